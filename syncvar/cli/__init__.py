"""The `syncvar` command: look at what the package would do, without starting a job."""
