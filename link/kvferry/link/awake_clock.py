"""A clock that counts only while this process is awake.

It is that of every deadline that a pause of this process must not use up. A machine stands still for seconds at
times, and an operator may stop a process for a minute. By a monotonic clock every lease would have expired meanwhile,
although its renewals were only not received yet.
"""

from __future__ import annotations

import threading

_LONGEST_PERIOD_S = 0.5

LONGEST_TURN_S = 0.25
"""What a pause of a worker counts for in the deadlines of its reads."""


class AwakeClock:
    """Seconds that this process was awake. Any thread may wind and read it.

    It is wound from several places, so that it is wound in time whenever the process runs:

    - the engine's thread winds it with every step;
    - the listener's thread winds it every `period_s`, since an idle engine takes no steps;
    - the transfer thread has a clock of its own, for its loads, and winds it in every turn.

    Args:
        heartbeat_s: the longest time that one call adds. For leases the interval at which consumers renew.

    Attributes:
        heartbeat_s: as given.
        awake_s: the time at the last winding.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self.awake_s = 0.0
        self._last_s: float | None = None

    @property
    def period_s(self) -> float:
        """Longest interval at which it must be wound."""
        return min(self.heartbeat_s / 2, _LONGEST_PERIOD_S)

    def wind(self, now_s: float) -> float:
        """Add the time since the last call and return `awake_s`. All callers pass `now_s` of one monotonic clock."""
        with self._lock:
            if self._last_s is None:
                self._last_s = now_s
            # Threads read the time before they get the lock, so a later call may bring an earlier time.
            passed_s = max(0.0, now_s - self._last_s)
            # At most a heartbeat: after a stop of a minute little time has passed, while a clock that is wound in time
            # loses nothing.
            self.awake_s += min(passed_s, self.heartbeat_s)
            self._last_s += passed_s
            return self.awake_s
