"""The memory of a worker: its caches, its device, host memory, and the slots that it reads."""
