"""`kvferry trace`: the slowest handovers with their causes, as tables, as JSON and for Perfetto."""
