"""Metrics: their tables, their way between processes, and Prometheus."""
