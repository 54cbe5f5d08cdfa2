"""Fork workers from a process that has already imported NumPy and syncvar."""
