"""One handover: the events that all processes recorded of it. Times are by the clock of each process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.trace.events import (
    DecodeArrived,
    LeaseName,
    LoadEnded,
    ParamsGiven,
    PrefillArrived,
    ProcessStarted,
    RequestEvent,
)

EventT = TypeVar("EventT", bound=RequestEvent)


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The events of one request in the scheduler of one engine.

    Attributes:
        request: its id in this engine.
        events: the first event of each type.
    """

    process: ProcessStarted
    request: str
    events: dict[type[RequestEvent], RequestEvent] = field(default_factory=dict)

    def add(self, event: RequestEvent) -> None:
        """Keep an event, unless there is one of its type."""
        self.events.setdefault(type(event), event)

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type; None if it was not recorded."""
        found = self.events.get(kind)
        return found if isinstance(found, kind) else None


@dataclass(frozen=True, slots=True)
class Load:
    """The events of one worker of the consumer."""

    process: ProcessStarted
    ended: LoadEnded

    @property
    def begun_ns(self) -> int:
        """When the worker received the order."""
        return self.ended.stages[0].begun_ns if self.ended.stages else self.ended.at_ns

    @property
    def ended_ns(self) -> int:
        """When the load ended."""
        return self.ended.stages[-1].ended_ns if self.ended.stages else self.ended.at_ns


@dataclass(frozen=True, slots=True)
class Handover:
    """Both halves; one of them may not have been recorded, or not have happened.

    Attributes:
        lease: the lease that joins them; None where neither half had one.
        loads: loads of all workers of the consumer.

    Texts are empty where they are unknown.
    """

    lease: LeaseName | None
    prefill: Half | None = None
    decode: Half | None = None
    loads: tuple[Load, ...] = ()

    def get(self, kind: type[EventT]) -> EventT | None:
        """The event of a type, which only one half can have; None if it was not recorded."""
        return next(filter(None, (half.get(kind) for half in (self.prefill, self.decode) if half)), None)

    @property
    def producer_request(self) -> str:
        """The request's id in the producer."""
        if self.prefill:
            return self.prefill.request
        arrived = self.get(DecodeArrived)
        return arrived.remote_request if arrived else ""

    @property
    def producer(self) -> str:
        """The producer's engine id."""
        if self.prefill:
            return self.prefill.process.engine_id
        arrived = self.get(DecodeArrived)
        return arrived.producer if arrived else ""

    @property
    def consumer_request(self) -> str:
        """The request's id in the consumer."""
        return self.decode.request if self.decode else ""

    @property
    def consumer(self) -> str:
        """The consumer's engine id."""
        return self.decode.process.engine_id if self.decode else ""

    @property
    def traceparent(self) -> str:
        """The W3C trace parent of the request."""
        known = (self.get(DecodeArrived), self.get(PrefillArrived))
        return next((one.traceparent for one in known if one and one.traceparent), "")

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, 0 where unknown."""
        known = (self.get(ParamsGiven), self.get(PrefillArrived), self.get(DecodeArrived))
        return next((one.tokens for one in known if one), 0)
