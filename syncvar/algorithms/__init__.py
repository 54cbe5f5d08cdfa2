"""Schedules of messages as data, and the choice between them. Pure functions."""
