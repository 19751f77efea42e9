"""Staged reads: the pool of memory that they go through, and the loads that wait for a part of it."""
