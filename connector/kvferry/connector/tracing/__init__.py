"""Events for the file in `trace_dir` and for OpenTelemetry, and the value by which a client finds its request."""
