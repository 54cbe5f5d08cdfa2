"""Persistent calls: what repeats in a call is done once, then the call is run many times."""
