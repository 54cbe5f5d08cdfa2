"""Variables on servers: strategy, client, server and transport."""
