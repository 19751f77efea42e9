"""The leases of a producer's worker: the table of slots that consumers read, and the notifications of consumers."""
