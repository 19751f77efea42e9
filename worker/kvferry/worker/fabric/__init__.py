"""The fabric: a port for registering memory and reading from peers, and NIXL behind it."""
