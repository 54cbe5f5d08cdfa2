"""Persistent calls: build the parts of a call that repeat once, then run the call many times."""
