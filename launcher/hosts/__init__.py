"""Workers on other hosts, through one agent per host."""
