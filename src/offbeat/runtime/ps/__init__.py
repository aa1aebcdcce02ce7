"""The parameter server: clients, servers, and the messages between them."""
