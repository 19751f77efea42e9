"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """The delay before the next attempt: doubled after every consecutive failure, and jittered so that the engines of a
    fleet do not retry at the same time.

    Args:
        failures: consecutive failures so far, at least 1.
        first_s, longest_s: bounds before the jitter of up to ±50 %.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) * random.uniform(0.5, 1.5)  # noqa: S311
