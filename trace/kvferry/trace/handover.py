"""One handover: the events that all processes recorded of it. Times are by the clock of each process."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseName,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    ProcessStarted,
    Recomputed,
)


@dataclass(slots=True, eq=False)
class Prefill:
    """The producer's half; events that were not recorded are None.

    Attributes:
        process: its scheduler.
        request: its id in the producer.
    """

    process: ProcessStarted
    request: str
    arrived: PrefillArrived | None = None
    scheduled: PrefillScheduled | None = None
    given: ParamsGiven | None = None
    over: LeaseOver | None = None


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


@dataclass(slots=True, eq=False)
class Decode:
    """The consumer's half; events that were not recorded are None.

    Attributes:
        process: its scheduler.
        request: its id in the consumer.
    """

    process: ProcessStarted
    request: str
    arrived: DecodeArrived | None = None
    ordered: LoadOrdered | None = None
    reported: LoadReported | None = None
    recomputed: Recomputed | None = None
    scheduled: DecodeScheduled | None = None
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """Both halves; one of them may not have been recorded, or not have happened.

    Attributes:
        lease: the lease that joins them; None where neither half had one.
        loads: loads of all workers of the consumer.
    """

    lease: LeaseName | None
    prefill: Prefill | None = None
    decode: Decode | None = None
    loads: tuple[Load, ...] = ()

    @property
    def producer_request(self) -> str:
        """The request's id in the producer; empty where unknown."""
        if self.prefill is not None:
            return self.prefill.request
        arrived = self.decode.arrived if self.decode else None
        return arrived.remote_request if arrived else ""

    @property
    def producer(self) -> str:
        """The producer's engine id; empty where unknown."""
        if self.prefill is not None:
            return self.prefill.process.engine_id
        arrived = self.decode.arrived if self.decode else None
        return arrived.producer if arrived else ""

    @property
    def consumer_request(self) -> str:
        """The request's id in the consumer; empty where the consumer's half is missing."""
        return self.decode.request if self.decode else ""

    @property
    def consumer(self) -> str:
        """The consumer's engine id; empty where its half is missing."""
        return self.decode.process.engine_id if self.decode else ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, 0 where unknown."""
        known = (
            *((self.prefill.given, self.prefill.arrived) if self.prefill else ()),
            *((self.decode.arrived,) if self.decode else ()),
        )
        return next((one.tokens for one in known if one is not None), 0)
