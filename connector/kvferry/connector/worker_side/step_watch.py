"""Whether a step has run to its end: one that raised has not written what it was to write."""

from __future__ import annotations

import sys


class StepWatch:
    """Finds out whether the step of one worker has raised, which vLLM does not tell a connector.

    vLLM's first model runner calls the hooks of a step's end in a `finally`, so an exception is being handled when they
    are called. The second one leaves them out, and the next thing that is heard is the beginning of another step.

    Where steps overlap, some more have been scheduled by then, which may go on from what was not written. They count as
    raised, too.

    Args:
        max_steps: the most steps in flight.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._bad_steps = 0
        self._handled: BaseException | None = None
        self._has_reported = True

    def has_raised(self) -> bool:
        """Whether what the present step computes must not be read."""
        if sys.exc_info()[1] is not self._handled:
            self._bad_steps = self._max_steps
        return self._bad_steps > 0

    def reports(self) -> None:
        """The step's results are taken: both runners do so in every step that does not raise."""
        self._has_reported = True

    def end(self) -> None:
        """Another step is about to begin."""
        if not self._has_reported:
            self._bad_steps = self._max_steps

    def begin(self) -> None:
        """A step begins."""
        self._bad_steps = max(0, self._bad_steps - 1)
        self._handled = sys.exc_info()[1]  # the caller may be handling another error all the while
        self._has_reported = False
