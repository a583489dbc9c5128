"""What people type, one module a command: parse, one call, render, exit."""
