"""The peers of a worker: handshakes, the registry of connected producers, the plan for each pair."""
