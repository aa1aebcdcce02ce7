"""A simulated parameter server: clients, servers and their network."""
