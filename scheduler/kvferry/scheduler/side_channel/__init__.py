"""The side channel: the server that answers, the heartbeat that renews leases, the prewarmer that finds producers."""
