"""Parts of every state machine here: transition tables, counters, the observer of changes, the clock."""
