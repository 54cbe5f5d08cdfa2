"""Run one job: attempts, restarts, failure reports and statistics."""
