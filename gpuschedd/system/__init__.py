"""What the daemon needs of the host: clock, accounts, places, the service manager."""
