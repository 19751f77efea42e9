"""The parts of the side channel that both ends use: sockets, shared secrets, key trials, backoff."""
