"""Admission: which waiting request gets blocks, and which leases end for it.

`BlockDemand` counts what requests lack, as vLLM will count it. `LeaseEviction` ends held leases when the engine needs
their blocks or slots. `Admission` has vLLM skip a request that would stop the others. `StallWatch` notices if nothing
is computed all the same.

**Skipped requests.** vLLM has two queues (`Scheduler.schedule`, v1/core/sched/scheduler.py:911). Requests that hold
blocks are in the first one: loads in flight, loads that have ended, sessions. It is served first, and in both vLLM
*stops* at the first request whose blocks are not free. That is safe as long as the first queue's head holds most of
what it needs. A load that failed breaks this. vLLM takes its blocks away and leaves it where it is. It then needs more
than its load took wherever a layer has a window, or where its blocks may still be written and are pinned. The loads
behind it hold blocks, good or failed, and are not looked at: nothing runs any more, and nothing changes that.

A request for which the connector says "not yet" is *skipped*: the ones behind it are looked at, and if it holds no
blocks it moves to the front of the second queue. So these wait like that:

| request | why it must not stop the queue | it waits until |
| --- | --- | --- |
| a failed load, once | the loads behind it hold blocks | it has moved to the second queue |
| one too big beside pinned blocks | pins last as long as a producer stands still, maybe for ever | pins return |
| a load too big beside a failed one | each would wait for the other, see `_is_kept_out` | the failed one runs |

Of the last two kinds all but the first few are parked (`Parking`), and looked at again when pins or failed loads have
changed.

**Eviction.** A prompt's lease lives until its consumer has read it, an offered turn's for minutes. Without eviction, if
the router is slow or loses a response, the cache would fill up with blocks that no consumer reads, and requests would
wait for them; two engines that wait for each other's blocks would wait for ever. `eviction_order.py` has the order and
the rules.

**Stalls.** While requests wait and vLLM admits none, even if enough blocks are counted as free, admission is *stalled*.
The n-th heartbeat of a stall asks for 2**(n-1) blocks more than are free. So a wrong count starves no request, and few
leases end for a request that does not wait for blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.requests import (
    EngineRequest,
    EngineRequests,
    FailedLoad,
    Parking,
    SchedulerContext,
)
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.vllm.core import EngineLoop
from kvferry.connector.vllm.scheduler import (
    EngineBlocks,
    is_running,
    needs_blocks,
    waits_for_blocks,
    waits_for_load,
)
from kvferry.scheduler.consumer.ledger import QuarantinedBlocks
from kvferry.scheduler.producer.eviction_order import Demand, candidates, evict
from kvferry.scheduler.producer.ledger import SCAN_S
from kvferry.scheduler.requests import ProducerLease, RemotePromptState

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


_FIRST = 8
"""Number of waiting requests whose need is counted. vLLM admits in order, so later ones wait for these anyway."""


class BlockDemand:
    """What the requests of one engine need, now and after every preemption.

    Attributes:
        draft_tokens: tokens of one step of a request with drafts; 0 without them.
    """

    def __init__(
        self, config: VllmConfig, requests: EngineRequests, blocks: EngineBlocks
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._max_running = config.scheduler_config.max_num_seqs
        self._lookahead = config.num_lookahead_tokens
        self.draft_tokens = 0
        if config.num_speculative_tokens:
            self.draft_tokens = 1 + config.num_speculative_tokens + self._lookahead
        self._stalled_since_s: float | None = None
        self._stalled_blocks = 1

    def needs(self) -> list[int]:
        """Blocks that each of the first waiting requests lacks, in order."""
        # Running requests are mostly first in the order, so this reads at most as many as can run, and a few more.
        waiting: list[Request] = []
        is_any_running = False
        for entry in self._requests.in_order:
            request = entry.request
            if is_running(request):
                is_any_running = True
            if needs_blocks(request):
                waiting.append(request)
            if len(waiting) == _FIRST:
                break
        # As vLLM: it leaves its watermark free only while something runs.
        watermark = self._blocks.watermark if is_any_running else 0
        needs: list[int] = []
        for request in waiting:
            needs.append(self.lacking(request) + watermark)
        return needs

    def lacking(self, request: Request) -> int:
        """Blocks that the whole sequence of a request lacks, with its lookahead tokens."""
        max_tokens = self._blocks.max_model_len
        num_tokens = min(request.num_tokens, max_tokens)
        return self._blocks.lacking(
            request.request_id,
            num_tokens,
            min(num_tokens + self._lookahead, max_tokens),
            num_computed=request.num_computed_tokens,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    # Stalls.

    def stalled_blocks(self, clock_s: float, heartbeat_s: float) -> int:
        """Blocks that waiting requests are assumed to lack besides the free ones: more than 0 once in a heartbeat.

        The first call begins the stall.
        """
        if self._stalled_since_s is None:
            self._stalled_since_s = clock_s
        if clock_s < self._stalled_since_s + heartbeat_s:
            return 0
        self._stalled_since_s = clock_s
        if not self._may_lack_blocks():
            return 0
        blocks = self._stalled_blocks
        self._stalled_blocks *= 2
        return blocks

    def end_stall(self) -> None:
        """Admission is not stalled: a request was admitted or has ended, or none can lack blocks."""
        self._stalled_since_s = None
        self._stalled_blocks = 1

    def _may_lack_blocks(self) -> bool:
        """True if a request may be waiting for blocks only. It reads all requests."""
        num_running = 0
        is_any_waiting = False
        for entry in self._requests:
            request = entry.request
            if is_running(request):
                num_running += 1
                if request.is_prefill_chunk:
                    return False  # a prefill can use up every step: others wait for its end, not for blocks
            elif waits_for_blocks(request):
                is_any_waiting = True
        return is_any_waiting and num_running < self._max_running


_RESERVED = 8
"""Turns and prefixes may be held while more than 1/8 of the blocks and of the slots are free."""

_COUNT_S_PER_BLOCK = 10e-6
"""Wait per leased block before counting again: ten times the cost of counting the blocks that only leases keep."""


class LeaseEviction:
    """Compares the free blocks with the requests' need once per step, and ends leases.

    Args:
        block_demand: the blocks that this engine's requests lack.
        max_leased_fraction: fraction of the engine's blocks that leases alone may keep for longer than a heartbeat.
    """

    def __init__(
        self,
        context: SchedulerContext,
        block_demand: BlockDemand,
        steps: Steps,
        max_leased_fraction: float,
    ) -> None:
        self._leases = context.leases
        self._blocks = context.blocks
        self._offers_turns = context.local.offers_turns
        self._block_demand = block_demand
        self._steps = steps
        self._max_leased_fraction = max_leased_fraction
        self._is_disabled = False
        # When leases that may still be read were first too many; None while they are not.
        self._missed_since_s: float | None = None
        self._recheck_s = 0.0
        self._first_ending: str | None = None
        self._first_ending_since_s = 0.0

    @property
    def is_coming(self) -> bool:
        """True if blocks of ended leases will return to the pool soon, so that vLLM should wait and not preempt."""
        # While the engine wakes, it does not know yet which leases ended while it slept.
        if self._steps.is_waking:
            return True
        # If a worker's transfer thread is stuck, blocks do not return, and vLLM must not wait for them for ever: the
        # lease that has been ending for the longest has a heartbeat.
        heartbeat_s = self._leases.clock.heartbeat_s
        if self._leases.clock.awake_s > self._first_ending_since_s + heartbeat_s:
            return False
        return self._leases.block_references.num_coming() > 0

    def evict(self) -> None:
        """End as many leases as needed; their blocks return with the workers' reports, a step or two later."""
        # While the engine wakes it is not known which leases are over. To end others would cost a prefill each.
        if self._steps.is_waking or self._is_disabled:
            return
        # This reads vLLM's internals. Without eviction the engine goes on, and leases live until they expire.
        try:
            self._evict()
        except Exception:
            self._is_disabled = True
            logger.exception(
                "lease eviction disabled: free blocks could not be counted"
            )

    def _evict(self) -> None:
        references = self._leases.block_references
        clock_s = self._leases.clock.awake_s
        first_ending = next(iter(references.ending), None)
        if first_ending is None or first_ending != self._first_ending:
            self._first_ending = first_ending
            self._first_ending_since_s = clock_s
        longest = self._blocks.longest
        has_blocks = references.held or references.ending or references.returning
        if longest is None or not has_blocks or clock_s < self._recheck_s:
            return
        demand = self._demand(longest)
        if demand is None:
            self._missed_since_s = None
            return
        num_held = len(references.held)
        ranked = candidates(self._leases)
        # At least as many as leases alone keep, and free to know.
        num_leased = len(references.counts)
        if num_leased > demand.cap:
            self._recheck_s = clock_s + num_leased * _COUNT_S_PER_BLOCK
            num_leased = references.num_leased()
        if evict(ranked, references, num_leased, demand, self._end):
            self._missed_since_s = None
            return
        if self._missed_since_s is None:
            self._missed_since_s = clock_s
        # A shortage lasts, and so do leases that may not end yet: to rank thousands of them in every step would cost
        # each step milliseconds. All that were held count, since those without a rank cost as much.
        self._recheck_s = max(self._recheck_s, clock_s + num_held * SCAN_S)

    def _end(self, lease: ProducerLease, how: str) -> None:
        self._leases.end(lease, how)
        logger.debug(
            "req=%s slot=%d: lease ended early (%s)", lease.request_id, lease.slot, how
        )

    def _demand(self, longest: int) -> Demand | None:
        """The blocks and slots that leases must give up; None if none.

        Args:
            longest: blocks of the longest possible request.
        """
        references = self._leases.block_references
        num_blocks = self._blocks.num_blocks
        # Without the null block.
        cap = int((num_blocks - 1) * self._max_leased_fraction)
        reserve = 0
        are_slots_short = False
        if self._offers_turns or self._leases.num_prefixes:
            reserve = num_blocks // _RESERVED
            are_slots_short = self._are_slots_short()
        num_leased = len(references.counts)
        is_within_limits = num_leased <= cap and not are_slots_short
        num_free = self._blocks.num_free
        if is_within_limits and num_free >= longest + reserve:
            # No request can need more. Most steps end here, so this is all that they pay: it has constant cost.
            references.are_blocks_short = False
            self._block_demand.end_stall()
            return None
        num_coming = references.num_coming()
        needs = self._block_demand.needs()
        references.are_blocks_short = max(needs, default=0) > num_free
        num_free += num_coming
        # A request that lacks more than all leases could give up is not admitted by eviction. It waits for running
        # ones, and the leases would end for nothing.
        need = 0
        for lacking in needs:
            if lacking <= num_free + num_leased:
                need = max(need, lacking)
        stalled_blocks = 0
        may_be_stalled = bool(needs) and not num_coming and num_free < longest
        if may_be_stalled:
            stalled_blocks = self._block_demand.stalled_blocks(
                self._leases.clock.awake_s,
                self._leases.clock.heartbeat_s,
            )
        if stalled_blocks:
            need = max(need, min(num_free + stalled_blocks, longest))
        if is_within_limits and num_free >= need + reserve:
            return None
        return Demand(
            free=num_free,
            need=need,
            reserve=reserve,
            cap=cap,
            are_slots_short=are_slots_short,
            lasts=bool(stalled_blocks) or self._is_missed_for_long(),
        )

    def _are_slots_short(self) -> bool:
        """True if turns or prefixes occupy slots that other leases will need."""
        slots = self._leases.slots
        num_free = len(slots.free) + len(self._leases.block_references.ending)
        return num_free < slots.count / _RESERVED

    def _is_missed_for_long(self) -> bool:
        """True if the need or the cap has been missed for a heartbeat."""
        if self._missed_since_s is None:
            return False
        heartbeat_s = self._leases.clock.heartbeat_s
        return self._leases.clock.awake_s >= self._missed_since_s + heartbeat_s


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
        # Most requests never wait, and each comes here several times.
        if self._skipped.looked_at:
            self._skipped.leave(entry)

    def must_wait(self, entry: EngineRequest, *, may_load: bool) -> bool:
        """True if vLLM must skip this request in this step. Asked while it holds no blocks.

        Args:
            may_load: whether it may begin a load. If not, vLLM reserves nothing against it.
        """
        if entry.failed_load in (FailedLoad.FAILED, FailedLoad.TRIED):
            return self._must_move(entry)
        # In nearly all engines at all times: nothing is pinned, and no load has failed.
        may_any_wait = bool(self._moved or self._quarantine.num_blocks)
        if not may_any_wait or not self._is_kept_out(entry, may_load=may_load):
            if self._skipped.looked_at:
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
        if not self._moved or entry in self._moved or not may_load:
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
        if not self._quarantine.num_blocks or not self._can_count:
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


class StallWatch:
    """Notices that the engine computes nothing although nothing keeps it from that.

    No order of events is known in which that lasts (see above). It would be the worst fault of all, since a
    decoder that stands still looks like one without work, and ends only when clients give up. So it is counted and
    logged.

    Args:
        loop: an engine that is paused does not stand still.
    """

    def __init__(self, context: SchedulerContext, loop: EngineLoop) -> None:
        self._context = context
        self._loop = loop
        # When it began, on the leases' clock, and how many heartbeats of it were counted.
        self._since_s: float | None = None
        self._num_heartbeats = 0

    def step(self, computes: bool) -> None:
        """A step has been scheduled.

        Args:
            computes: whether it computes tokens.
        """
        has_requests = bool(self._context.requests.in_order)
        if computes or self._context.loads.in_flight or not has_requests:
            self._since_s = None
            return
        # On the leases' clock, which stands still while this process does not run: a paused machine is no stall.
        clock_s = self._context.leases.clock.awake_s
        if self._since_s is None:
            self._since_s = clock_s
            self._num_heartbeats = 0
        heartbeat_s = self._context.leases.clock.heartbeat_s
        # It reads all requests, so once in a heartbeat and not in every step.
        if clock_s < self._since_s + heartbeat_s * (self._num_heartbeats + 1):
            return
        holding = [
            entry.request for entry in self._context.requests if self._is_over(entry)
        ]
        waiting = [
            entry.request
            for entry in self._context.requests
            if waits_for_blocks(entry.request) and entry.record.query is None
        ]
        is_stalled = bool(holding) or (
            bool(waiting) and self._context.blocks.num_free > 0
        )
        if not is_stalled or self._loop.is_paused:
            self._since_s = None
            return
        self._num_heartbeats += 1
        self._context.counters.add("stalled_heartbeats")
        if _is_power_of_two(self._num_heartbeats):  # it may last for hours
            self._log(clock_s - self._since_s, holding, waiting)

    def _is_over(self, entry: EngineRequest) -> bool:
        """True if its load has ended, while vLLM has not looked at it since."""
        prompt = entry.record.prompt
        if prompt is None or not waits_for_load(entry.request):
            return False
        return prompt.state in (RemotePromptState.LOADED, RemotePromptState.FAILED)

    def _log(
        self, lasted_s: float, holding: list[Request], waiting: list[Request]
    ) -> None:
        num_pinned = self._context.loads.quarantine.num_blocks
        example = (holding or waiting)[0]
        advice = (
            "abort that request or restart this engine, and report this line as a bug"
        )
        if num_pinned:
            advice = "restart the producer that does not answer, or wait for failed_read_grace_s: pinned blocks return"
        logger.error(
            "nothing was computed for %.0f s, though %d requests wait for blocks and %d whose load is over have not "
            "been looked at, %d of %d blocks are free (%d pinned by failed loads, %d leased) and no load is in flight; "
            "one of them is req=%s with %d tokens (%s): %s",
            lasted_s,
            len(waiting),
            len(holding),
            self._context.blocks.num_free,
            self._context.blocks.num_blocks - 1,
            num_pinned,
            len(self._context.leases.block_references.counts),
            example.request_id,
            example.num_tokens,
            example.status.name,
            advice,
        )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
