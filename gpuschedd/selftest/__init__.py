"""The self-test: are this host's GPUs seen and given as they are? Through jobs of its own."""
