"""Replicated variables, and the policy of their reads and writes."""
