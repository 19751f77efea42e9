"""Metrics: their tables, the statistics passed between processes, and Prometheus."""
