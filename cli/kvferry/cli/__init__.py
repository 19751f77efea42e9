"""Commands for operators; the first, `kvferry plan`, comes with the planner for unequal engines."""
