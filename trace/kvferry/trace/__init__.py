"""Timelines: what an engine's processes record of every handover, and how those records become one picture."""
