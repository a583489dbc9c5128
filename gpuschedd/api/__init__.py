"""The wire's side: who is asking, what it may, and the answer."""
