"""The connector in a worker's process."""
