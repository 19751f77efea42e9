"""Requests whose tokens vLLM may still take back, because a load within a step may turn out to have failed.

A child of MultiConnector may load the first tokens of a request *synchronously*, within the step that first computes
the request. vLLM schedules that step as if the tokens were there. From the step's output it learns which blocks were
not filled, and takes the tokens back, with all that was computed from them (`Scheduler._handle_invalid_blocks`): of
that request and, since blocks are in the prefix cache as soon as they are scheduled, of every other one that has hit
them, in the same step or in one that was scheduled before the output came.

So a request that is admitted while such a load is not answered is *unsettled*: nothing of it is published. It is
settled by the first step that is scheduled after the answers to all loads that it may have hit. From then on nothing
can be taken back: its first blocks are loaded or vLLM has put its count back already, and a load only ever fills
blocks that were allocated for it.

To wait for the answer to every step would be simpler. It was rejected: where steps overlap, that delays each part of a
prompt by a whole step, also in engines that have no such child.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet


class UnsettledRequests:
    """The unsettled requests of one engine.

    Args:
        max_steps: the most steps in flight. vLLM's loop schedules no further one before the oldest is answered, so a
            step that is scheduled so many later comes after the answer.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._step = 0
        self._answered_by = 0  # the first step that comes after the answers to all loads so far
        self._admitted: set[str] = set()
        self._settled_by: dict[str, int] = {}
        self._computed: list[tuple[int, Sequence[int]]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._settled_by

    def admitted(self, request_id: str) -> None:
        """vLLM has allocated the first blocks of a request; the step in which it does so has not begun yet."""
        self._admitted.add(request_id)

    def begin_step(self, *, loads: bool) -> None:
        """A step has been scheduled.

        Args:
            loads: whether requests are loaded within it.
        """
        self._step += 1
        if loads:
            self._answered_by = self._step + self._max_steps
        self._computed = [(step, table) for step, table in self._computed if step > self._step]
        for request_id in [name for name, step in self._settled_by.items() if step <= self._step]:
            del self._settled_by[request_id]
        admitted = self._admitted
        self._admitted = set()
        if self._answered_by <= self._step:
            return
        for request_id in admitted:
            self._settled_by[request_id] = self._answered_by

    def computes(self, request_id: str, table: Sequence[int]) -> None:
        """The step that has begun computes tokens of a request, with these blocks. Nothing happens if it is settled."""
        settled_by = self._settled_by.get(request_id)
        if settled_by is not None:
            self._computed.append((settled_by, table))

    def relying_on(self, invalid: AbstractSet[int]) -> Iterator[Sequence[int]]:
        """What unsettled steps have computed from blocks that were not filled, these included: also for requests that
        have ended since, or were preempted, whose blocks vLLM leaves in the prefix cache."""
        for _, table in self._computed:
            first = first_of(invalid, table)
            if first is not None:
                yield table[first:]


def first_of(invalid: AbstractSet[int], table: Sequence[int]) -> int | None:
    """The position of the first of these blocks in a request's table."""
    return next((position for position, block in enumerate(table) if block in invalid), None)
