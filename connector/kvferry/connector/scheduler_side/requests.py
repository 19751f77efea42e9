"""What the parts of the scheduler side share: the requests that this engine has, and the context around them.

Each request has one record, in the order in which vLLM admits them. A part that has to remember something of a request
writes it into the record. So nothing of it is left when the request has ended, and no part has to be told.

Of the requests that wait for the same thing vLLM skips all but the first few, the *parked* ones. For a waiting request
vLLM looks up its prompt's prefix before it asks the connector, in every step. With 512 requests whose prefix of 256
blocks is cached, that took 205 ms a step; with all but 16 parked, 4 ms. Two parts park, each with a `Parking` of its
own, because each waits for something else: `prompt_queries.py` for answers, `admission.py` for pinned blocks and failed
loads. A request that has left one may enter the other.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.sessions import Session
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.vllm.scheduler import EngineBlocks, can_park, park, unpark
from kvferry.link.counters import Counters
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prefix_directory import ListedSequence
from kvferry.scheduler.requests import ProducerLease, RequestRecord, RequestTable

if TYPE_CHECKING:
    from vllm.v1.request import Request


IssuedTicket = tuple[RemotePrefill, ProducerLease]
"""The params of a prompt, and the lease that holds its blocks."""

_AdmissionKey = tuple[int, float, str]
"""Priority, time of arrival, id: vLLM's order of admission."""

_ADMISSION_KEY = attrgetter("admission_key")


class FailedLoad(enum.Enum):
    """How far a failed load is on its way to be computed, see `Admission`."""

    NONE = enum.auto()
    FAILED = enum.auto()
    """vLLM has not looked at it since."""
    TRIED = enum.auto()
    """vLLM was to take it where it is."""
    MOVED = enum.auto()
    """It waits in vLLM's second queue."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request, from its arrival until it has ended.

    Attributes:
        request_id: vLLM's own of it.
        request: vLLM's.
        record: its lease, its remote prompt and its query, which may outlive it.
        admission_key: vLLM admits the request with the least one first.
        own_lease: this engine's lease that keeps the request's prefix in the cache, see `RequestIntake`.
        session: if its input is streamed.
        settled_by_step: the step from which on vLLM takes nothing back that it has computed, see `TakeBacks`.
        ticket: what was issued for its prompt before the request has ended, see `TicketBuilder`.
        must_fail: it fails as soon as vLLM has given it a block, since its prefill has failed, see `PromptQueries`.
        failed_load: its load has failed, and vLLM has not given it blocks since.
        may_load: while it is skipped: whether it may begin a load, see `Admission`.
        listed_sequence: its tokens, which other engines may find in the cache, see `PrefixLeases`.
        num_scheduled: the tokens that steps so far have computed or will, see `UndoneSteps`.
    """

    request_id: str
    request: Request
    record: RequestRecord
    admission_key: _AdmissionKey
    own_lease: LeaseName | None = None
    session: Session | None = None
    settled_by_step: int = 0
    ticket: IssuedTicket | None = None
    must_fail: bool = False
    failed_load: FailedLoad = FailedLoad.NONE
    may_load: bool = False
    listed_sequence: ListedSequence | None = None
    num_scheduled: int = 0


class EngineRequests:
    """The requests of one engine that have not ended. Iterates over them, in any order.

    Args:
        by_priority: whether vLLM admits by priority first.

    Attributes:
        table: the records of both ledgers, by request too.
        in_order: all, in the order in which vLLM admits them.
    """

    def __init__(self, table: RequestTable, *, by_priority: bool = False) -> None:
        self.table = table
        self.in_order: list[EngineRequest] = []
        self._by_priority = by_priority
        self._by_id: dict[str, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._by_id.values())

    def find(self, request_id: str) -> EngineRequest | None:
        """The request of this id; None if it has ended."""
        return self._by_id.get(request_id)

    def get(self, request_id: str) -> EngineRequest:
        """The request of this id, which has not ended."""
        return self._by_id[request_id]

    def enter(self, request: Request) -> EngineRequest:
        """The record of vLLM's request; a new one if it was never announced."""
        # vLLM means to let requests bypass `on_new_request` while a connector is not ready. To miss one must not end an
        # engine: it is served without a transfer.
        known = self._by_id.get(request.request_id)
        return self.add(request) if known is None else known

    def add(self, request: Request) -> EngineRequest:
        """A request has arrived."""
        self.ended(request.request_id)
        record = self.table.enter(request.request_id)
        record.is_unfinished = True
        priority = request.priority if self._by_priority else 0
        admission_key = (priority, request.arrival_time, request.request_id)
        added = EngineRequest(request.request_id, request, record, admission_key)
        self._by_id[request.request_id] = added
        insort(self.in_order, added, key=_ADMISSION_KEY)
        return added

    def ended(self, request_id: str) -> EngineRequest | None:
        """A request has ended. Returns what was known of it, once; None for an unknown one."""
        ended = self._by_id.pop(request_id, None)
        if ended is None:
            return None
        del self.in_order[
            bisect_left(self.in_order, ended.admission_key, key=_ADMISSION_KEY)
        ]
        ended.record.is_unfinished = False
        self.table.drop_if_over(ended.record)
        return ended


MAX_LOOKED_AT = 16
"""Most requests that wait for the same thing and that vLLM looks at in a step."""


class Parking:
    """The requests of one engine that wait for the same thing. Iterates over them.

    Attributes:
        looked_at: requests that vLLM looks at in each step. Others are parked only while these are `MAX_LOOKED_AT`, so
            if there are none, no request waits.
    """

    def __init__(self) -> None:
        self.looked_at: set[EngineRequest] = set()
        self._parked: dict[EngineRequest, None] = {}  # the first that arrived is first

    def __contains__(self, entry: EngineRequest) -> bool:
        return entry in self.looked_at or entry in self._parked

    def __iter__(self) -> Iterator[EngineRequest]:
        yield from self.looked_at
        yield from self._parked

    def enter(self, entry: EngineRequest) -> None:
        """A request waits. It is parked if enough others do."""
        # One that cannot be parked counts as looked at: vLLM looks its prefix up in every step.
        has_room = len(self.looked_at) < MAX_LOOKED_AT
        if has_room or not can_park(entry.request):
            self.looked_at.add(entry)
            return
        park(entry.request)
        self._parked[entry] = None

    def leave(self, entry: EngineRequest) -> None:
        """A request waits no more, or has ended; the first parked one takes its place. No-op for other requests."""
        self.looked_at.discard(entry)
        if entry in self._parked:
            del self._parked[entry]
            # Answered before its turn to be looked at: vLLM can admit it in the next step.
            unpark(entry.request)
        # The first that arrived: nobody waits longer than it must because others arrived later.
        while self._parked and len(self.looked_at) < MAX_LOOKED_AT:
            first = next(iter(self._parked))
            del self._parked[first]
            self.looked_at.add(first)
            unpark(first.request)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """The engine, its requests with both ledgers over them, and where events are counted and recorded.

    Attributes:
        local: what this engine is.
        requests: those that it has.
        leases, loads: the ledgers of a producer and of a consumer; an engine has both, whatever its role.
        blocks: the engine's, once vLLM has bound its KV cache manager.
        tracing: None if nothing is recorded, as in most engines.
    """

    local: LocalEngine
    requests: EngineRequests
    leases: ProducerLedger
    loads: ConsumerLedger
    blocks: EngineBlocks
    counters: Counters
    tracing: SchedulerTracing | None
