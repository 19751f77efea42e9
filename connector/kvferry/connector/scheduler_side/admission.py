"""Which waiting request vLLM must skip, so that a load that failed never stops the others.

vLLM has two queues (`Scheduler.schedule`, v1/core/sched/scheduler.py:911). Requests that hold blocks are in the first
one: loads in flight, loads that have ended, sessions. It is served first, and in both vLLM *stops* at the first
request whose blocks are not free. That is safe as long as the first queue's head holds most of what it needs.
A load that failed breaks this. vLLM takes its blocks away and leaves it where it is. It then needs more than its load
took wherever a layer has a window, or where its blocks may still be written and are pinned. The loads behind it hold
blocks, good or failed, and are not looked at: nothing runs any more, and nothing changes that.

A request for which the connector says "not yet" is *skipped*: the ones behind it are looked at, and if it holds no
blocks it moves to the front of the second queue. So these wait like that:

| request | why it must not stop the queue | it waits until |
| --- | --- | --- |
| a failed load, once | the loads behind it hold blocks | it has moved to the second queue |
| one too big beside pinned blocks | pins last as long as a producer stands still, maybe for ever | pins return |
| a load too big beside a failed one | each would wait for the other, see `_is_kept_out` | the failed one runs |

vLLM looks up the prefix of a skipped request in every step. So of the last two kinds all but the first few are parked
(`parking.py`), and looked at again when pins or failed loads have changed.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.connector.scheduler_side.block_demand import BlockDemand
from kvferry.connector.scheduler_side.requests import EngineRequest, FailedLoad, Parking
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.scheduler.consumer.quarantine import QuarantinedBlocks

_MAX_COUNTED = 4096
"""Most lengths of requests whose number of blocks is remembered."""


class Admission:
    """The failed loads of one engine that wait to be computed, and what waits because of them.

    Args:
        demand: counts the blocks that requests lack.
        quarantine: its pinned blocks.
    """

    def __init__(
        self, demand: BlockDemand, blocks: EngineBlocks, quarantine: QuarantinedBlocks
    ) -> None:
        self._demand = demand
        self._blocks = blocks
        self._quarantine = quarantine
        self._moved: dict[EngineRequest, None] = {}  # in the order in which they moved
        self._skipped = Parking()
        self._counted: dict[tuple[int, int], int] = {}
        self._situation: tuple[int, tuple[EngineRequest, ...]] = (0, ())

    def failed(self, entry: EngineRequest) -> None:
        """A load has failed, and vLLM computes its prompt as soon as it fits."""
        if entry.failed_load is FailedLoad.NONE:
            entry.failed_load = FailedLoad.FAILED

    def left_queue(self, entry: EngineRequest) -> None:
        """vLLM has allocated blocks for a request, or it has ended: it waits no more."""
        entry.failed_load = FailedLoad.NONE
        self._moved.pop(entry, None)
        self._skipped.leave(entry)

    def must_wait(self, entry: EngineRequest, *, may_load: bool) -> bool:
        """True if vLLM must skip this request in this step. Asked while it holds no blocks.

        Args:
            may_load: whether it may begin a load. If not, vLLM reserves nothing against it.
        """
        if entry.failed_load in (FailedLoad.FAILED, FailedLoad.TRIED):
            return self._must_move(entry)
        if not self._is_kept_out(entry, may_load=may_load):
            self._skipped.leave(entry)
            return False
        # vLLM admits one that reads no prefix whatever the connector says, if it fits
        # (v1/core/sched/scheduler.py:983). Parked, it would not be admitted: so that one keeps its status.
        if entry not in self._skipped and not entry.request.skip_reading_prefix_cache:
            entry.may_load = may_load
            self._skipped.enter(entry)
        return True

    def look_again(self) -> None:
        """If pins or failed loads have changed, have vLLM look at what need not wait for them any more."""
        # In every step, so it must cost nothing while nothing changes, however many wait.
        situation = (self._quarantine.num_blocks, tuple(self._moved))
        if situation == self._situation:
            return
        self._situation = situation
        for entry in list(self._skipped):
            if not self._is_kept_out(entry, may_load=entry.may_load):
                self._skipped.leave(entry)

    def loads_nothing(self, entry: EngineRequest) -> bool:
        """True if no load of this request can begin while a failed one is shut out: vLLM would stop at it.

        Such a prompt is computed here instead. If it waited, it would wait as long as pins last, although it fits.
        """
        return bool(self._moved) and not self._fits_beside(entry, self._moved)

    def _is_kept_out(self, entry: EngineRequest, *, may_load: bool) -> bool:
        if self._is_shut_out(entry):
            return True
        if entry in self._moved or not may_load:
            return False
        # vLLM reserves the blocks of failed loads that wait (`_inflight_prefills`) against all new loads. By priority a
        # load may stand before one of them: it would not begin because of the reservation, and vLLM would stop at it,
        # so the failed one would not run either. Failed loads that are shut out themselves are left to `loads_nothing`.
        waiting = [failed for failed in self._moved if not self._is_shut_out(failed)]
        return bool(waiting) and not self._fits_beside(entry, waiting)

    def _must_move(self, entry: EngineRequest) -> bool:
        """True if a failed load is skipped, and so moves to the second queue."""
        # If its blocks seem to be free, vLLM is to take it at once: the usual case, and it costs no step. If vLLM asks
        # about it again, they were not: its own count differs, or others took them in this step.
        is_first_look = entry.failed_load is FailedLoad.FAILED
        if is_first_look and self._can_count and self._fits_beside(entry, ()):
            entry.failed_load = FailedLoad.TRIED
            return False
        entry.failed_load = FailedLoad.MOVED
        self._moved[entry] = None
        return True

    def _is_shut_out(self, entry: EngineRequest) -> bool:
        """True if a request cannot fit as long as blocks are pinned, even if all others end."""
        if not len(self._quarantine) or not self._can_count:
            return False
        # Block 0 is the null block.
        num_unpinned = self._blocks.num_blocks - 1 - self._quarantine.num_blocks
        return self._lacking(entry) > num_unpinned

    def _fits_beside(
        self, entry: EngineRequest, others: Iterable[EngineRequest]
    ) -> bool:
        """True if blocks for all of these requests are free now."""
        if not self._can_count:
            return True
        num_needed = self._lacking(entry)
        num_others = 0
        for other in others:
            num_needed += self._lacking(other)
            num_others += 1
        if num_others:
            # What vLLM reserves for drafts besides: for each request that waits, and once for the load itself.
            num_drafts = self._blocks.num_covering(self._demand.draft_tokens)
            num_needed += (num_others + 1) * num_drafts
        return num_needed <= self._blocks.num_free

    def _lacking(self, entry: EngineRequest) -> int:
        """Blocks of a request that holds none."""
        # Its lengths alone decide. vLLM takes some 5 us to count them, and `look_again` asks for all that are skipped.
        request = entry.request
        lengths = (request.num_prompt_tokens, request.num_tokens)
        num_blocks = self._counted.get(lengths)
        if num_blocks is None:
            if len(self._counted) >= _MAX_COUNTED:
                self._counted.clear()
            num_blocks = self._demand.lacking(request)
            self._counted[lengths] = num_blocks
        return num_blocks

    @property
    def _can_count(self) -> bool:
        """True if this vLLM counts the blocks of a request. If not, only failed loads move."""
        return self._blocks.longest is not None
