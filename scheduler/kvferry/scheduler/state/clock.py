"""A clock that stands while its process does: what the peers' silence is measured with."""

from __future__ import annotations

import threading

HEARTBEATS_PER_LEASE = 6


_LONGEST_PERIOD_S = 0.5


class AwakeClock:
    """Seconds that this process was awake, as far as those who wind it can tell. Any thread may wind and read it.

    One winding adds at most a heartbeat: a process that was stopped for a minute finds that little time has passed,
    while one that is wound in time loses nothing. An engine that works winds it with every step. An idle one takes
    no steps, so the listener's thread winds it too, every `period_s`.

    Args:
        heartbeat_s: how often consumers renew.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._awake_s = 0.0
        self._last_s: float | None = None

    @property
    def period_s(self) -> float:
        """How often it is to be wound at least."""
        return min(self.heartbeat_s / 2, _LONGEST_PERIOD_S)

    @property
    def awake_s(self) -> float:
        """What it shows."""
        return self._awake_s

    def wind(self, now_s: float) -> float:
        """It is `now_s`, by any clock that only goes forward, the same for all who wind. Returns what it shows now."""
        with self._lock:
            if self._last_s is None:
                self._last_s = now_s
            passed_s = max(0.0, now_s - self._last_s)
            self._awake_s += min(passed_s, self.heartbeat_s)
            self._last_s += passed_s
            return self._awake_s
