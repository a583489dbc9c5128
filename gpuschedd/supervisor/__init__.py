"""The supervisor: one process per attempt that starts a job, waits for it and records its end."""
