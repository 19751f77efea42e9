"""Staged reads: the pool of memory that they go to, and who waits for a part of it."""
