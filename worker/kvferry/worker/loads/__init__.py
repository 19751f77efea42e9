"""Loads: from the scheduler's order to the bytes in place, and the record of each."""
