"""Hosts that a scheduler has allocated."""
