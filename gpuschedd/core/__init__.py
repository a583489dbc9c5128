"""Pure decisions: no clock, no I/O, no logging, no randomness. The daemon and replay drive it."""
