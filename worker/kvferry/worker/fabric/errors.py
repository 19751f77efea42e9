"""What must not happen and may all the same: a bug, or NIXL raising what it never raised before.

The transfer thread outlives it, and so does whatever else it has to do.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_S = 1.0


class UnforeseenErrors:
    """Shows errors as the bugs they are, with their traceback, at most once a second; in between it counts."""

    def __init__(self) -> None:
        self._quiet_until_s = 0.0
        self._unshown = 0

    def show(self, what: str) -> None:
        """Call it in an `except` clause.

        Args:
            what: what the error has interrupted, and what goes on.
        """
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._unshown += 1
            return
        logger.exception("unforeseen error (%d more since the last one shown): %s", self._unshown, what)
        self._quiet_until_s, self._unshown = now_s + _QUIET_S, 0


unforeseen = UnforeseenErrors()
"""The process's one: a broken library breaks everything at once."""
