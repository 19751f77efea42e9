"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """The delay before the next attempt, doubled after every failure in a row and jittered so that a fleet does not
    retry in step.

    Args:
        failures: so far, at least 1.
        first_s, longest_s: before the jitter, which is up to a half either way.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) * random.uniform(0.5, 1.5)  # noqa: S311
