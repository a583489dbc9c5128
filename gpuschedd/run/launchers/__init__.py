"""How a supervisor is started: by the daemon itself, or by PID 1."""
