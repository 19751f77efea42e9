"""Whether a step has run to its end: one that raised has not written what it was to write."""

from __future__ import annotations

import sys


class StepWatch:
    """Finds out whether the step of one worker has raised, which vLLM does not tell a connector.

    vLLM throws such a step's output away, but the worker may live on. Without this watch its prompts would become READY
    like any other, and a decoder would read what was never written.

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
        # vLLM's first model runner calls the hooks of a step's end in a `finally`: if the step has raised, an exception
        # is being handled that was not when the step began.
        if sys.exc_info()[1] is not self._handled:
            self._count_bad_step()
        return self._bad_steps > 0

    def reports(self) -> None:
        """The step's results are taken: both runners do so in every step that does not raise."""
        self._has_reported = True

    def end(self) -> None:
        """Another step is about to begin."""
        # vLLM's second model runner leaves the hooks of a step's end out if the step has raised.
        if not self._has_reported:
            self._count_bad_step()

    def begin(self) -> None:
        """A step begins."""
        self._bad_steps = max(0, self._bad_steps - 1)
        # The caller may be handling another error all the while.
        self._handled = sys.exc_info()[1]
        self._has_reported = False

    def _count_bad_step(self) -> None:
        # Where steps overlap, some more have been scheduled before vLLM hears of it. They may go on from what was not
        # written, so they are bad too.
        self._bad_steps = self._max_steps
