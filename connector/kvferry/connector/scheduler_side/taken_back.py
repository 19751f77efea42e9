"""Tokens that count as computed and that nothing has computed: vLLM undoes steps, or takes tokens back.

**Steps that vLLM undoes while it schedules** (`UndoneSteps`). By priority it may preempt a request that it has
scheduled already. vLLM gives blocks their hashes when it schedules the step that fills them, and such a request is
taken out of the step again. Its blocks are free then and keep the hashes, although nothing has written them: the
request itself hits them when it is resumed, and so does every other one with its prompt (vllm#57580). The answers are
wrong, here and on every engine that reads the prompt from here. So those hashes are taken out of the prefix cache in
the same step.

**Tokens that vLLM takes back after a step** (`TakeBacks`). A child of MultiConnector may load the first tokens of a
request *synchronously*, within the step that first computes the request. vLLM schedules that step as if the tokens were
there. From the step's output it learns which blocks were not filled, and takes the tokens back, with all that was
computed from them (`Scheduler._handle_invalid_blocks`): of that request and of every other one that has hit those
blocks. So a request that is admitted while such a load is not answered is *unsettled*: nothing of it is published. It
is settled by the first step that is scheduled after the answers to all loads that it may have hit.

Of requests that share a block that was not filled, vLLM has one compute it again, and lets the others go on with what
they have computed from it. Those are *unsound* from then on, and so is every block that they fill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvferry.connector.scheduler_side.requests import (
    EngineRequest,
    EngineRequests,
)
from kvferry.connector.vllm.scheduler import EngineBlocks


class UndoneSteps:
    """Takes what undone steps would have computed out of the prefix cache.

    Only where vLLM may preempt a request that it has scheduled, see `facts.caches_uncomputed_blocks`.
    """

    def __init__(self, requests: EngineRequests, blocks: EngineBlocks) -> None:
        self._requests = requests
        self._blocks = blocks

    def scheduled(
        self, num_tokens: Mapping[str, int], preempted: Collection[str]
    ) -> None:
        """A step was scheduled.

        Args:
            num_tokens: of each request, in this step.
            preempted: requests whose blocks were freed since the last step.
        """
        for request_id in preempted:
            entry = self._requests.find(request_id)
            if entry is not None:
                # vLLM does not say whether it had scheduled the request. If not, it had hashed nothing more either.
                self._blocks.forget_after(entry.request, entry.num_scheduled)
                entry.num_scheduled = 0
        for request_id, num_new in num_tokens.items():
            entry = self._requests.find(request_id)
            if entry is not None:
                request = entry.request
                # Drafts count as scheduled, but only tokens that are certain are hashed.
                entry.num_scheduled = min(
                    request.num_computed_tokens + num_new, request.num_tokens
                )


class UnsoundRequests:
    """The unsound requests of one engine: what they fill is kept out of the prefix cache.

    It is not enough to do so once, when vLLM reports what was not filled: a block that such a request has filled in
    part has no hash yet, and gets one in the step that fills it.

    Attributes:
        first: by request, the position of the first block that it fills from its wrong beginning.
    """

    def __init__(self, requests: EngineRequests, blocks: EngineBlocks) -> None:
        self._requests = requests
        self._blocks = blocks
        self.first: dict[EngineRequest, int] = {}

    def scheduled(self, num_tokens: Mapping[str, int]) -> tuple[EngineRequest, ...]:
        """Take what a step has unsound requests fill out of the prefix cache.

        Returns:
            The requests that have hit such a block in this very step: they are unsound as well.
        """
        ended = [
            entry
            for entry in self.first
            if self._requests.find(entry.request_id) is not entry
        ]
        for entry in ended:
            del self.first[entry]
        filled = set[int]()
        for entry, first in self.first.items():
            if entry.request_id in num_tokens:
                filled.update(self._blocks.table(entry.request_id)[0][first:])
        # vLLM gives a block its hash when it schedules the step that fills it, so requests that it has scheduled after
        # that may have hit it. Of these, one may have hit another: hence until none is found.
        found: list[EngineRequest] = []
        while (hitting := self._hitting(filled, num_tokens)) is not None:
            found.append(hitting)
        self._blocks.forget_hits(filled)
        return tuple(found)

    def _hitting(
        self, filled: set[int], num_tokens: Mapping[str, int]
    ) -> EngineRequest | None:
        """One more request of this step that has one of these blocks, which now is unsound; None if there is none."""
        for request_id in num_tokens:
            entry = self._requests.find(request_id)
            if entry is None or entry in self.first:
                continue
            table = self._blocks.table(request_id)[0]
            first = first_of(filled, table)
            if first is not None:
                self.first[entry] = first
                filled.update(table[first:])
                return entry
        return None


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What vLLM has taken back.

    Attributes:
        not_filled: the blocks that were not filled, and what was computed from them.
        unsound: requests that go on from them as if they were.
    """

    not_filled: set[int]
    unsound: tuple[EngineRequest, ...]


class TakeBacks:
    """What vLLM may take back of what the requests of one engine compute, and what it has.

    Args:
        spans: see `LocalEngine`; of the only group, since vLLM refuses a report of blocks that were not filled where
            there are more.
        max_steps: the most steps in flight.

    Attributes:
        are_possible: False from the answers to all loads on, until another connector loads within a step again: then
            there is nothing to note in a step, and every request is settled. So it is in nearly all engines, always.
    """

    def __init__(
        self,
        requests: EngineRequests,
        blocks: EngineBlocks,
        spans: Sequence[int],
        max_steps: int,
    ) -> None:
        self.are_possible = False
        self._requests = requests
        self._blocks = blocks
        self._spans = spans
        self._max_steps = max_steps
        # Of the steps in which they are possible.
        self._step = 0
        # The first step that comes after the answers to all loads so far.
        self._answered_by = 0
        # What unsettled steps have computed: until which step it may be taken back, and the blocks.
        self._computed: list[tuple[int, Sequence[int]]] = []
        self._unsound = UnsoundRequests(requests, blocks)

    def begin_step(
        self,
        admitted: Iterable[EngineRequest],
        num_tokens: Mapping[str, int],
        *,
        loads: bool,
    ) -> tuple[EngineRequest, ...]:
        """A step has been scheduled. Called if another connector loads within it, or if `are_possible`.

        Args:
            admitted: requests to which vLLM has allocated their first blocks since the step before, or allocated them
                again.
            num_tokens: of each request.
            loads: whether another connector loads within this step.

        Returns:
            The requests that have become unsound in it.
        """
        self._step += 1
        if loads:
            # vLLM's loop schedules no further step before the oldest of `max_steps` is answered. To wait for the answer
            # to every step would be simpler. It was rejected: where steps overlap, that delays each part of a prompt by
            # a whole step, also in engines that have no such child.
            self._answered_by = self._step + self._max_steps
        # Whichever request of this step it is that loads: blocks are in the prefix cache as soon as they are scheduled,
        # so all the others may have hit what it is to fill.
        for entry in admitted:
            entry.settled_by_step = self._answered_by
            # If it is unsound, it begins anew, with other blocks.
            self._unsound.first.pop(entry, None)
        # No request is settled later than by the answers to all loads so far.
        is_answered = self._answered_by <= self._step
        if is_answered:
            self._computed.clear()
        else:
            self._note_computed(num_tokens)
        unsound: tuple[EngineRequest, ...] = ()
        if self._unsound.first:
            unsound = self._unsound.scheduled(num_tokens)
        self.are_possible = not is_answered or bool(self._unsound.first)
        return unsound

    def is_unsettled(self, entry: EngineRequest) -> bool:
        """True if vLLM may still take tokens of a request back."""
        # From `settled_by_step` on its first blocks are loaded, or vLLM has put its count back already. Later loads do
        # not matter: a load only ever fills blocks that were allocated for it.
        return entry.settled_by_step > self._step

    def may_come(self, blocks: Collection[int]) -> bool:
        """True if vLLM may still take back what was computed in one of these blocks."""
        if not self._computed:
            return False
        return any(self._relying_on(frozenset(blocks)))

    def has_come(self, invalid: set[int]) -> TakenBack:
        """vLLM has heard that these blocks were not filled, and has put back the counts of the requests that have them.

        Of requests that share such a block, vLLM has only one compute it again, and lets the others go on as if it were
        done already. That one may be late, be preempted or aborted, so the others are unsound.
        """
        not_filled = invalid.union(*self._relying_on(invalid))
        unsound: list[EngineRequest] = []
        for entry in self._requests:
            table = self._blocks.table(entry.request_id)[0]
            first = first_of(invalid, table)
            if first is None:
                continue
            not_filled.update(table[first:])
            span = self._spans[0]
            num_computed = entry.request.num_computed_tokens
            if num_computed > first * span:
                self._unsound.first[entry] = num_computed // span
                unsound.append(entry)
        if unsound:
            self.are_possible = True
        return TakenBack(not_filled, tuple(unsound))

    def _note_computed(self, num_tokens: Mapping[str, int]) -> None:
        """Forget what is settled, and note what this step computes of unsettled requests."""
        self._computed = [
            (settled_by, blocks)
            for settled_by, blocks in self._computed
            if settled_by > self._step
        ]
        for request_id in num_tokens:
            entry = self._requests.find(request_id)
            if entry is not None and self.is_unsettled(entry):
                table = self._blocks.table(request_id)[0]
                self._computed.append((entry.settled_by_step, table))

    def _relying_on(self, invalid: AbstractSet[int]) -> Iterator[Sequence[int]]:
        """What unsettled steps have computed from blocks that were not filled, these included."""
        # Not from the requests: some have ended since, or were preempted, and vLLM leaves their blocks in the prefix
        # cache.
        for _, table in self._computed:
            first = first_of(invalid, table)
            if first is not None:
                yield table[first:]


def first_of(blocks: AbstractSet[int], table: Sequence[int]) -> int | None:
    """The position of the first of these blocks in a request's table."""
    for position, block in enumerate(table):
        if block in blocks:
            return position
    return None
