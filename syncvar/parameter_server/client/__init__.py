"""A worker's side of parameter servers."""
