"""What only runs under an MPI is not looked at where there is none."""

collect_ignore = ["mpi_agent.py"]
