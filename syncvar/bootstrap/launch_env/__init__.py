"""Read rank, size and addresses from the environment of another launcher or scheduler."""
