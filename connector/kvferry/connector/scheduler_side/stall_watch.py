"""The watch over an engine that computes nothing although nothing keeps it from that."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.vllm.requests import waits_for_blocks, waits_for_load
from kvferry.scheduler.consumer.remote_prompt import RemotePromptState

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class StallWatch:
    """Notices that the engine computes nothing although nothing keeps it from that.

    No order of events is known in which that lasts (`admission.py`). It would be the worst fault of all, since a
    decoder that stands still looks like one without work, and ends only when clients give up. So it is counted and
    logged.

    Args:
        steps: an engine that is paused does not stand still.
    """

    def __init__(self, context: SchedulerContext, steps: Steps) -> None:
        self._requests = context.requests
        self._blocks = context.blocks
        self._leases = context.leases
        self._loads = context.loads
        self._counters = context.counters
        self._steps = steps
        self._since_s: float | None = None  # on the leases' clock
        self._num_heartbeats = 0

    def step(self, computes: bool) -> None:
        """A step has been scheduled.

        Args:
            computes: whether it computes tokens.
        """
        if computes or self._loads.in_flight or not len(self._requests):
            self._reset()
            return
        # On the leases' clock, which stands still while this process does not run: a paused machine is no stall.
        clock_s = self._leases.clock_s
        if self._since_s is None:
            self._since_s = clock_s
        heartbeat_s = self._leases.clock.heartbeat_s
        # It reads all requests, so once in a heartbeat and not in every step.
        if clock_s < self._since_s + heartbeat_s * (self._num_heartbeats + 1):
            return
        holding = [entry.request for entry in self._requests if self._is_over(entry)]
        waiting = [
            entry.request
            for entry in self._requests
            if waits_for_blocks(entry.request) and entry.record.query is None
        ]
        is_stalled = bool(holding) or (bool(waiting) and self._blocks.num_free > 0)
        if not is_stalled or self._steps.is_paused:
            self._reset()
            return
        self._num_heartbeats += 1
        self._counters.add("stalled_heartbeats")
        if _is_power_of_two(self._num_heartbeats):  # it may last for hours
            self._log(clock_s - self._since_s, holding, waiting)

    def _reset(self) -> None:
        self._since_s = None
        self._num_heartbeats = 0

    def _is_over(self, entry: EngineRequest) -> bool:
        """True if its load has ended, while vLLM has not looked at it since."""
        prompt = entry.record.prompt
        if prompt is None or not waits_for_load(entry.request):
            return False
        return prompt.state in (RemotePromptState.LOADED, RemotePromptState.FAILED)

    def _log(
        self, lasted_s: float, holding: list[Request], waiting: list[Request]
    ) -> None:
        num_pinned = self._loads.quarantine.num_blocks
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
            self._blocks.num_free,
            self._blocks.num_blocks - 1,
            num_pinned,
            len(self._leases.block_references),
            example.request_id,
            example.num_tokens,
            example.status.name,
            advice,
        )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
