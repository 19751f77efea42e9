"""The memory of a worker: its caches, devices, the slots that it reads, and the zeroing of tails."""
