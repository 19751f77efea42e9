"""Pure geometry: which bytes of which producer worker go where. Needs numpy and msgspec only, and does no I/O."""
