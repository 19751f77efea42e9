"""The side channel: its client, and what both ends share (sockets, secrets)."""
