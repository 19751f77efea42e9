"""`kvferry trace`: timelines of handovers as a picture, a page, tables and JSON."""
