"""What several tests use: jobs, worlds, hosts, and scripts that ranks run."""
