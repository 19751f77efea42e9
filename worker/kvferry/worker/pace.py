"""How often the transfer thread polls. No I/O and no clock: the caller passes the time.

| while | it polls after |
| --- | --- |
| something is in flight | 50 µs, doubled up to 1 ms or 3 times what polling everything takes; reset by any progress |
| leases are held | 2 ms, doubled up to 20 ms while no notification arrives |
| a failed read may still write, or a message is flushed | 10 ms |
| nothing is expected | 250 ms |

New messages of the inbox wake the thread at once and reset both pauses.
"""

from __future__ import annotations

MIN_BACKOFF_S = 50e-6
MAX_BACKOFF_S = 1e-3
_POLLING_SHARE = 3
"""The longest pause, in multiples of the time that polling everything in flight takes: a thousand transfers are polled
for at most a quarter of the time."""
MIN_NOTIFICATION_BACKOFF_S = 2e-3
MAX_NOTIFICATION_BACKOFF_S = 20e-3
IDLE_NOTIFICATION_S = 0.25
"""Interval at which notifications are taken while none are expected. NIXL keeps them until then, any number from any
agent that reaches it: 80,000 of 60 kB were 4.5 GB."""
QUARANTINE_POLL_S = 10e-3


class PollPace:
    """The pauses that grow.

    Attributes:
        backoff_s: before the next poll of what is in flight.
        notification_backoff_s: before the next notifications are taken while leases are held.
        take_unexpected_s: when notifications are taken next while none are expected, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.backoff_s = MIN_BACKOFF_S
        self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S
        self.take_unexpected_s = 0.0

    def woken(self) -> None:
        """A message has arrived."""
        self.backoff_s = MIN_BACKOFF_S
        self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S

    def progressed(self) -> None:
        """Something in flight has progressed: what follows it may be short."""
        self.backoff_s = MIN_BACKOFF_S

    def polled_in_vain(self, round_s: float) -> None:
        """Nothing in flight has progressed.

        Args:
            round_s: how long it takes to poll everything.
        """
        longest_s = max(MAX_BACKOFF_S, _POLLING_SHARE * round_s)
        self.backoff_s = min(self.backoff_s * 2, longest_s)

    def notified(self) -> None:
        """A notification that was expected has arrived."""
        self.notification_backoff_s = MIN_NOTIFICATION_BACKOFF_S

    def not_notified(self) -> None:
        """Notifications are expected, and none has arrived."""
        doubled_s = 2 * self.notification_backoff_s
        self.notification_backoff_s = min(doubled_s, MAX_NOTIFICATION_BACKOFF_S)

    def took_unexpected(self, now_s: float, *, has_arrived: bool) -> None:
        """Notifications were taken while none were expected. Where one has arrived, more may follow at once."""
        pause_s = IDLE_NOTIFICATION_S
        if has_arrived:
            pause_s = MIN_NOTIFICATION_BACKOFF_S
        self.take_unexpected_s = now_s + pause_s
