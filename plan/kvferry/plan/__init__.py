"""Transfer plans from two engines' descriptions: pure geometry. Needs numpy and msgspec only, and does no I/O."""
