"""Frames, control messages, and the pure state machines that decide about a job."""
