"""The requests that this engine has: one record each, in the order in which vLLM admits them.

A part of the scheduler side that has to remember something of a request writes it into the request's record. So nothing
of it is left when the request has ended, and no part has to be told.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.sessions import Session
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.producer.lease import ProducerLease
from kvferry.scheduler.producer.prefix_index import ListedSequence
from kvferry.scheduler.requests import RequestRecord, RequestTable

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
        settled_by_step: the step from which on vLLM takes nothing back that it has computed, see `UnsettledRequests`.
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
    """

    def __init__(self, table: RequestTable, *, by_priority: bool = False) -> None:
        self.table = table
        self._by_priority = by_priority
        self._by_id: dict[str, EngineRequest] = {}
        self._in_order: list[EngineRequest] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._by_id.values())

    def in_order(self) -> Iterator[EngineRequest]:
        """All, in the order in which vLLM admits them."""
        return iter(self._in_order)

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
        insort(self._in_order, added, key=_ADMISSION_KEY)
        return added

    def ended(self, request_id: str) -> EngineRequest | None:
        """A request has ended. Returns what was known of it, once; None for an unknown one."""
        ended = self._by_id.pop(request_id, None)
        if ended is None:
            return None
        del self._in_order[
            bisect_left(self._in_order, ended.admission_key, key=_ADMISSION_KEY)
        ]
        ended.record.is_unfinished = False
        self.table.drop_if_over(ended.record)
        return ended
