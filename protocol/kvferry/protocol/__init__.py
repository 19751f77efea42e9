"""Everything that crosses a process border: wire messages, step metadata, errors.

Needs msgspec and numpy only. It opens no socket and starts no thread.
"""
