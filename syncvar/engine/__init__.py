"""Calls under way: groups, operations, the engine that advances them, messages, prepared calls, what is recorded of them."""
