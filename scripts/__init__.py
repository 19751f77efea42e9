"""Commands for users: the accuracy test, the checks, and what they share."""
