"""The memory of a worker: its caches, its device, host memory, and the destination of slot reads."""
