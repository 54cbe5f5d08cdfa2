"""Example programs: `syncvar-launch --workers 4 -m syncvar.examples.digits`."""
