"""Everything that crosses a process border: wire messages, step metadata, errors.

Needs msgspec and numpy only; `side_channel.sockets` and `side_channel.key_trials` need pyzmq as well.
"""
