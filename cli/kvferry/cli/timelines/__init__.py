"""Timelines of handovers as a picture, a page, tables and JSON."""
