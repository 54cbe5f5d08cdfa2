"""Programs that run right after installation: `syncvar-launch --workers 4 -m syncvar.examples.digits`."""
