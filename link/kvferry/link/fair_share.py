"""How many of the places that clients fill one host may have."""

from __future__ import annotations


def has_share(count: int, taken: int, most: int) -> bool:
    """Whether a host with `count` of the `taken` places may have one more of `most`: if it has fewer than are free.

    Clients choose how many places they want, and for which host. By this rule one host gets half of them at most, two
    get a third each, and there is always one for the next. A fixed part of them was rejected: it would be too few for a
    fleet on one host.
    """
    return count < most - taken
