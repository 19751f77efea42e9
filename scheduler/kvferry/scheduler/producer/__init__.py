"""The producing side: leases on the blocks of prefilled requests."""
