"""The phases of a handover, in their order."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """A phase of a handover; those of a load have the names of the stages in `LoadEnded`.

    Attributes:
        PREFILL_QUEUE: the prompt waits in the producer for blocks, a slot or a step.
        PREFILL: the producer computes the prompt.
        ROUTER: the answer goes to the router, and the request from there to the consumer.
        DECODE_QUEUE: the prompt waits in the consumer for blocks or a step.
        ORDER: the order to load is on its way to the worker.
        LOAD: the workers load; no stages were recorded.
        QUEUED: the load waits for its turn.
        CONNECTING: it waits until the producer is connected and the device is done with the blocks' last owner.
        FENCE: it waits until the slots of the producer's workers show that the blocks are ready.
        POSTING: its reads are prepared and posted.
        READING: the reads run, and staged bytes are put in place.
        FENCE_AGAIN: it checks that the lease was valid throughout the reads.
        REPORT: the worker's report is on its way to the scheduler, which waits for all workers and for its next step.
        FIRST_STEP: the request waits for the first step that computes it.
        HELD: the producer keeps the blocks, from the end of the prompt on.
    """

    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    ROUTER = "router"
    DECODE_QUEUE = "decode_queue"
    ORDER = "order"
    LOAD = "load"
    QUEUED = "queued"
    CONNECTING = "connecting"
    FENCE = "fence"
    POSTING = "posting"
    READING = "reading"
    FENCE_AGAIN = "fence_again"
    REPORT = "report"
    FIRST_STEP = "first_step"
    HELD = "held"
