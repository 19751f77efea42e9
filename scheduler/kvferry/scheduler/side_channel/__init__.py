"""The side channel: the server that answers, the heartbeat that renews leases, and the prewarmer that looks for producers."""
