"""Events for the file in `trace_dir` and for OpenTelemetry."""
