"""Internal errors: bugs, and exceptions of NIXL that the fabric does not translate.

The transfer thread survives them and continues with its other work.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_S = 1.0


class InternalErrors:
    """Logs internal errors with their traceback, at most once a second; those in between are counted."""

    def __init__(self) -> None:
        self._quiet_until_s = 0.0
        self._suppressed = 0

    def log(self, what: str) -> None:
        """Log the exception that is being handled.

        Args:
            what: the work that the error interrupted, and what continues.
        """
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._suppressed += 1
            return
        logger.exception("internal error (%d more since the last one logged): %s", self._suppressed, what)
        self._quiet_until_s, self._suppressed = now_s + _QUIET_S, 0


internal_errors = InternalErrors()
"""One for the process: a broken library makes all parts fail at once."""
