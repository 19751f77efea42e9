"""The connector in the scheduler's process."""
