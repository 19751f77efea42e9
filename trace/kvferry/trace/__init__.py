"""Timelines: recording of every handover by an engine's processes, and merging of the records."""
