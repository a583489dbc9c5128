"""The client: the words, the wire, and the commands people type. Never imports the daemon."""
