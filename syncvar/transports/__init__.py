"""Move frames between ranks: in memory, over ZeroMQ, or over MPI."""
