"""From what a person or a script asks for to one job request."""
