"""What crosses a process border: wire messages, step metadata, errors. Needs msgspec and numpy only."""
