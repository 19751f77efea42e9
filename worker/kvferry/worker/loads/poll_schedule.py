"""When the slots of one producer are polled next. No I/O and no clock: the caller passes the time.

    step ends        quiet: three quarters of the time that a step takes          step ends
    ────┬──────────────────────────────────────────────────────────┬──┬──┬──┬──┬──────┬────→
        changed                                                    polls, 1 to 5 ms   changed

Polls begin 1 ms apart and, while no slot of the producer changes, a twentieth of the time since the last change, 5 ms
at most. None begins in the first three quarters of the time that the producer's next step takes, if the two before were
as long: 50 ms at most, and less by as much as fewer tokens are missing than the last step has computed.

The quiet time is worth its rules: each poll takes the interpreter's lock, for which the engine's step waits, and
without them 0.92 requests/s were served in place of 0.97.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_PAUSE_S = 1e-3
_MAX_PAUSE_S = 5e-3
_PAUSE_SHARE = 1 / 20
_QUIET_SHARE = 0.75
_MAX_QUIET_S = 50e-3


@dataclass(slots=True)
class PollSchedule:
    """The schedule of the polls of one producer's slots.

    Attributes:
        changed_s: the last change of a slot, or the first wait.
        due_s: when the next poll is due.
        stepped_s: when a change last reported tokens: a step of the producer has ended.
        gaps_s: the times between the last three of them.
        step_tokens: the tokens of the last one.
    """

    changed_s: float
    due_s: float
    stepped_s: float = -math.inf
    gaps_s: tuple[float, float] = (0.0, 0.0)
    step_tokens: int = 1

    def begin(self, now_s: float) -> None:
        """The first wait begins while none is left; what is known of the producer's steps stays."""
        self.changed_s = now_s
        self.due_s = math.inf

    def add_wait(self, now_s: float, missing: int) -> None:
        """A wait begins.

        Args:
            missing: most tokens that any wait lacks.
        """
        soon_s = max(now_s + _MIN_PAUSE_S, self.quiet_until_s(missing))
        self.due_s = min(self.due_s, soon_s)

    def put_off(self, now_s: float) -> None:
        """A poll that was due could not begin."""
        self.due_s = now_s + _MIN_PAUSE_S

    def changed(self, now_s: float, tokens: int) -> None:
        """Slots have changed, and report so many tokens more."""
        self.changed_s = now_s
        # Slots also change without a step: a lease ends, or goes on under another epoch.
        if tokens <= 0:
            return
        gap_s = 0.0
        if self.stepped_s > -math.inf:
            gap_s = now_s - self.stepped_s
        self.stepped_s = now_s
        self.gaps_s = (self.gaps_s[1], gap_s)
        self.step_tokens = tokens

    def polled(self, begun_s: float, now_s: float, missing: int) -> None:
        """A poll that began at `begun_s` has ended; its changes are in already."""
        pause_s = (now_s - self.changed_s) * _PAUSE_SHARE
        pause_s = min(max(pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
        self.due_s = max(begun_s + pause_s, self.quiet_until_s(missing))

    def quiet_until_s(self, missing: int) -> float:
        """When the next step can have ended, at the earliest."""
        # The shorter of the two gaps: steps of uneven length are polled as early as the short ones want.
        gap_s = min(self.gaps_s) * min(1.0, missing / self.step_tokens)
        return self.stepped_s + min(_QUIET_SHARE * gap_s, _MAX_QUIET_S)

    def is_recent(self, now_s: float) -> bool:
        """Whether waits that begin now are for the step after the last one; else the producer has been idle."""
        return now_s < self.stepped_s + _MAX_QUIET_S
