"""What a user types: the accuracy test, the checks, and what they share."""
