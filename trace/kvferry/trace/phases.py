"""The phases of a handover, in their order, with their names and meanings for people."""

from __future__ import annotations

import enum


class Phase(str, enum.Enum):
    """A phase of a handover, also the stages of a worker's load; `HANDOVER` is the whole, after the prefill.

    Attributes:
        value: its name in JSON.
        label: its name in tables and pictures.
        meaning: a short description.
    """

    _value_: str
    label: str
    meaning: str

    def __new__(cls, value: str, label: str, meaning: str) -> Phase:
        member = str.__new__(cls, value)
        member._value_, member.label, member.meaning = value, label, meaning
        return member

    def __str__(self) -> str:
        return str(self.value)

    PREFILL_QUEUE = "prefill_queue", "prefill queue", "the producer has no room or no step for it yet"
    PREFILL = "prefill", "prefill", "the producer computes the prompt"
    HANDOVER = "handover", "handover", "from the prompt's end until it is loaded, or computed here"
    ROUTER = "router", "router", "from the producer's answer to the consumer, by the router"
    DECODE_QUEUE = "decode_queue", "decode queue", "the consumer has no blocks or no step for it yet"
    ORDER = "order", "order", "the order to load goes to the workers"
    LOAD = "load", "load", "the workers load; their stages are not recorded"
    QUEUED = "queued", "load queued", "the worker has other loads to do first"
    CONNECTING = "connecting", "connecting", "first contact with the producer, or the device is not done"
    FENCE = "fence", "fence", "the producer's worker is not ready"
    POSTING = "posting", "posting", "reads are prepared and posted"
    READING = "reading", "reading", "bytes are under way"
    FENCE_AGAIN = "fence_again", "second fence", "check that the lease was still valid"
    REPORT = "report", "report", "some workers have not reported to the scheduler yet"
    FIRST_STEP = "first_step", "first step", "loaded, and not scheduled yet"
    HELD = "held", "held", "the producer keeps the blocks"
