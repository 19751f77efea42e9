"""Events for the file in `trace_dir` and for OpenTelemetry, and the client's correlation value of a request."""
