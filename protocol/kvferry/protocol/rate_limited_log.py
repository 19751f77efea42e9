"""A log for lines that others could repeat until the disk is full: other hosts, or a library that fails everywhere."""

from __future__ import annotations

import logging
import time


class RateLimitedLog:
    """Logs at most one line an interval, which ends with the number of lines omitted before it, if any.

    Args:
        interval_s: from one line to the next.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 1.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._quiet_until_s = 0.0
        self._omitted = 0

    def warning(self, text: str, *values: object) -> None:
        """As `Logger.warning`."""
        self._log(logging.WARNING, text, values, shown=False)

    def exception(
        self, text: str, *values: object, error: BaseException | None = None
    ) -> None:
        """As `Logger.exception`: with the traceback of an error, by default of the one that is being handled."""
        self._log(logging.ERROR, text, values, shown=error or True)

    def _log(
        self,
        level: int,
        text: str,
        values: tuple[object, ...],
        *,
        shown: BaseException | bool,
    ) -> None:
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._omitted += 1
            return
        self._quiet_until_s = now_s + self._interval_s
        if self._omitted:
            text = f"{text} ({self._omitted} similar lines omitted)"
            self._omitted = 0
        # Three frames up is the caller of `warning` or `exception`: its file and line belong into the record.
        self._logger.log(level, text, *values, exc_info=shown, stacklevel=3)
