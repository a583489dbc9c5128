"""From a decision to a process and back."""
