"""What is seen on the GPUs, and what may be placed there; a vendor is one folder below."""
