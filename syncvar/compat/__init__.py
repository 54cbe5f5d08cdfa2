"""Interfaces of other libraries over syncvar: programs written for them run with one change."""
