"""The only room that changes job state: the controller and what it judges."""
