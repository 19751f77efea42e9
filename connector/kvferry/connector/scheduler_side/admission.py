"""Which waiting request vLLM must skip, so that a load that failed never stops the others; and the watch over that.

vLLM has two queues. Requests that hold blocks are in the first one: loads in flight, loads that have ended, sessions.
It is always served before the second, and in both vLLM *stops* at the first request whose blocks are not free. That
is safe as long as the first queue's head holds most of what it needs. A load that failed breaks this: vLLM takes its
blocks away, leaves it where it is, and it needs more than its load took wherever a layer has a window, or where its
blocks may still be written and are pinned. The loads behind it hold blocks, good or failed, and are not looked at;
then nothing runs any more, and nothing changes that.

A request for which the connector says "not yet" is *skipped*: the ones behind it are looked at, and if it holds no
blocks it moves to the front of the second queue. So these wait like that:

    a failed load, once                     it moves to the second queue: the first has only requests with blocks
    a request that cannot fit beside        pins last as long as a producer stands still: minutes, or for ever
    pinned blocks
    a load that does not fit beside         vLLM reserves a failed load's blocks against all new loads. By priority
    a failed load that waits                they may stand before it: each would wait for the other

For a request that is skipped vLLM looks its prefix up in every step, so of the last two kinds all but the first few are
parked (`parking.py`), and looked at again when pins or failed loads have changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.lease_eviction import UnfinishedRequests
from kvferry.connector.scheduler_side.parking import Parking
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.connector.vllm.requests import waits_for_blocks, waits_for_load
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.pending_queries import PendingQueries
from kvferry.scheduler.consumer.quarantine import QuarantinedBlocks
from kvferry.scheduler.consumer.remote_prompt import LoadState
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MAX_COUNTED = 4096
"""Most lengths of requests whose number of blocks is remembered."""


class Admission:
    """The failed loads of one engine that wait to be computed, and what waits because of them.

    Args:
        requests: all requests of the engine.
        quarantine: its pinned blocks.
    """

    def __init__(
        self, requests: UnfinishedRequests, blocks: EngineBlocks, quarantine: QuarantinedBlocks
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._quarantine = quarantine
        self._failed: set[str] = set()  # vLLM has not looked at them since
        self._tried: set[str] = set()  # vLLM was to take them where they are
        self._moved: dict[str, Request] = {}
        self._skipped: dict[str, bool] = {}  # whether each may load
        self._parking = Parking()
        self._counted: dict[tuple[int, int], int] = {}
        self._situation: tuple[int, tuple[str, ...]] = (0, ())

    def failed(self, request_id: str) -> None:
        """A load has failed, and vLLM computes its prompt as soon as it fits."""
        if request_id in self._requests.by_id:
            self._failed.add(request_id)

    def admitted(self, request_id: str) -> None:
        """vLLM has allocated blocks for a request, or it has ended."""
        self._failed.discard(request_id)
        self._tried.discard(request_id)
        self._moved.pop(request_id, None)
        self._is_free(request_id)

    def must_wait(self, request: Request, *, may_load: bool) -> bool:
        """Whether vLLM must skip this request in this step. Asked while it holds no blocks.

        Args:
            may_load: whether it may begin a load. If not, vLLM reserves nothing against it.
        """
        if request.request_id in self._failed or request.request_id in self._tried:
            return self._moves(request)
        if not self._is_kept_out(request, may_load=may_load):
            self._is_free(request.request_id)
            return False
        if request.request_id not in self._skipped and not request.skip_reading_prefix_cache:
            # vLLM admits one that reads no prefix whatever the connector says, if it fits: that one keeps its status.
            self._skipped[request.request_id] = may_load
            self._parking.enter(request)
        return True

    def look_again(self) -> None:
        """If pins or failed loads have changed, have vLLM look at what need not wait for them any more."""
        situation = (self._quarantine.num_blocks, tuple(self._moved))
        if situation == self._situation:
            return
        self._situation = situation
        for request_id, may_load in list(self._skipped.items()):
            request = self._requests.by_id.get(request_id)
            if request is None or not self._is_kept_out(request, may_load=may_load):
                self._is_free(request_id)

    def loads_nothing(self, request: Request) -> bool:
        """Whether no load of this request can begin while a failed one is shut out: vLLM would stop at it."""
        return bool(self._moved) and not self._fits_beside(request, self._moved.values())

    def _is_free(self, request_id: str) -> None:
        """A request has to wait no more, if it had to."""
        if self._skipped.pop(request_id, None) is not None:
            self._parking.leave(request_id)

    def _is_kept_out(self, request: Request, *, may_load: bool) -> bool:
        if self._is_shut_out(request):
            return True
        if request.request_id in self._moved or not may_load:
            return False
        moved = [other for other in self._moved.values() if not self._is_shut_out(other)]
        return bool(moved) and not self._fits_beside(request, moved)

    def _moves(self, request: Request) -> bool:
        """Whether a failed load is skipped, and so moves. If its blocks seem to be free, vLLM is to take it at once; if
        it is asked about again, they were not."""
        is_first = request.request_id in self._failed
        self._failed.discard(request.request_id)
        if is_first and self._can_count and self._fits_beside(request, ()):
            self._tried.add(request.request_id)
            return False
        self._tried.discard(request.request_id)
        self._moved[request.request_id] = request
        return True

    def _is_shut_out(self, request: Request) -> bool:
        """Whether a request cannot fit as long as blocks are pinned, even if all others end."""
        if not len(self._quarantine) or not self._can_count:
            return False
        usable = self._blocks.num_blocks - 1 - self._quarantine.num_blocks  # without the null block
        return self._lacking(request) > usable

    def _fits_beside(self, request: Request, others: Iterable[Request]) -> bool:
        """Whether blocks for all of these requests are free now."""
        if not self._can_count:
            return True
        lacking = list(map(self._lacking, (request, *others)))
        if len(lacking) > 1:
            # What vLLM reserves for drafts besides: for each request that waits, and once for the load itself.
            lacking.append(len(lacking) * self._blocks.num_covering(self._requests.draft_tokens))
        return sum(lacking) <= self._blocks.num_free

    def _lacking(self, request: Request) -> int:
        """Blocks of a request that holds none: its lengths alone decide. vLLM takes some 5 us to count them."""
        lengths = (request.num_prompt_tokens, request.num_tokens)
        counted = self._counted.get(lengths)
        if counted is None:
            if len(self._counted) >= _MAX_COUNTED:
                self._counted.clear()
            counted = self._counted[lengths] = self._requests.lacking(self._blocks, request)
        return counted

    @property
    def _can_count(self) -> bool:
        """Whether this vLLM counts the blocks of a request. If not, only failed loads move."""
        return self._blocks.longest is not None


class StallWatch:
    """Notices that the engine computes nothing although nothing keeps it from that.

    No order of events is known in which that lasts. It would be the worst fault of all, since a decoder that stands
    still looks like one without work, and ends only when clients give up: so it is counted and logged.

    Args:
        requests: all requests of the engine.
    """

    def __init__(
        self,
        requests: UnfinishedRequests,
        blocks: EngineBlocks,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        steps: Steps,
        counters: Counters,
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._leases = leases
        self._loads = loads
        self._steps = steps
        self._counters = counters
        self._since_s: float | None = None
        self._heartbeats = 0

    def step(self, computes: bool, asking: PendingQueries) -> None:
        """A step has been scheduled. It looks at the requests once in a heartbeat, and only if nothing is computed.

        Args:
            asking: requests in it wait for answers of their producers.
        """
        if computes or self._loads.in_flight or not self._requests.by_id:
            self._since_s = None
            self._heartbeats = 0
            return
        clock_s = self._leases.clock_s
        if self._since_s is None:
            self._since_s = clock_s
        heartbeat_s = self._leases.clock.heartbeat_s
        if clock_s < self._since_s + heartbeat_s * (self._heartbeats + 1):
            return
        holding = [request for request in self._requests.by_id.values() if self._is_over(request)]
        waiting = [
            request
            for request in self._requests.by_id.values()
            if waits_for_blocks(request) and request.request_id not in asking
        ]
        has_reason = not holding and not (waiting and self._blocks.num_free)
        if has_reason or self._steps.is_paused:
            self._since_s = None
            self._heartbeats = 0
            return
        self._heartbeats += 1
        self._counters.add("stalled_heartbeats")
        if (
            self._heartbeats & (self._heartbeats - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th: it may last for hours
            self._log(clock_s - self._since_s, holding, waiting)

    def _is_over(self, request: Request) -> bool:
        """Whether its load has ended, while vLLM has not looked at it since."""
        return waits_for_load(request) and self._loads.state(request.request_id) in (
            LoadState.LOADED,
            LoadState.FAILED,
        )

    def _log(self, lasted_s: float, holding: list[Request], waiting: list[Request]) -> None:
        pinned = self._loads.quarantine.num_blocks
        first = (holding or waiting)[0]
        advice = "abort that request or restart this engine, and report this line as a bug"
        if pinned:
            advice = "restart the producer that does not answer, or wait for failed_read_grace_s: pinned blocks return"
        logger.error(
            "nothing was computed for %.0f s, though %d requests wait for blocks and %d whose load is over have not "
            "been looked at, %d of %d blocks are free (%d pinned by failed loads, %d leased) and no load is in flight; "
            "one of them is req=%s with %d tokens (%s): %s",
            lasted_s,
            len(waiting),
            len(holding),
            self._blocks.num_free,
            self._blocks.num_blocks - 1,
            pinned,
            len(self._leases.block_references),
            first.request_id,
            first.num_tokens,
            first.status.name,
            advice,
        )
