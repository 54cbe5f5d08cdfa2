"""What a rank does in one call in shared memory: programs, how calls are lowered to them, and what runs them."""
