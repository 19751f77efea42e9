"""Shared parts of the state machines: transition tables, counters, the observer of changes, the clock."""
