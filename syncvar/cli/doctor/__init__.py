"""`syncvar doctor`: checks this machine, or the hosts of a job, before a job starts."""
