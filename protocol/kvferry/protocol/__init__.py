"""What crosses a process border: wire messages, step metadata, errors.

Needs msgspec and numpy only; `channel_socket` and `secret_trials` need pyzmq as well.
"""
