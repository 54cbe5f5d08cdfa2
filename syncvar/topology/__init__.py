"""Who is where: ranks, hosts and groups as plain data, without any process."""
