"""The parameter server's protocol: clients, servers and their manager as machines without I/O."""
