"""Everything that crosses a process border: wire messages, step metadata, errors.

Needs msgspec and numpy only; `side_channel` needs pyzmq as well, its `secrets` apart.
"""
