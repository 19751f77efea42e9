"""How many cases a random test draws: less than half of the full number in a usual run, all of them in a full one.

Each run draws other cases (`tests/seeds.py`), so what one leaves out others have; `just full` draws the full number.
"""

from __future__ import annotations

import os

VARIABLE = "KVFERRY_DRAWS"
USUAL_SHARE = 0.4
FEWEST = 10


def draws(full: int) -> int:
    """The number for this run, of a test whose full number is `full`."""
    share = float(os.environ.get(VARIABLE, USUAL_SHARE))
    return max(min(full, FEWEST), round(share * full))
