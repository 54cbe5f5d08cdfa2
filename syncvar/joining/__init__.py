"""How a process comes into a job: it finds the others, proves that it belongs, and holds what it is in."""
