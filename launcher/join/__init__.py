"""Hosts that join a job by its address and key."""
