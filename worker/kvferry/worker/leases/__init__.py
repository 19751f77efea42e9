"""Leases on a producer's worker: the table of slots that consumers read, and the consumers' notifications."""
