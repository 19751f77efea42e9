"""Loads: from an order of the scheduler to bytes in place, and the record of each."""
