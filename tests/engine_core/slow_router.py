"""A producer whose router returns late or never, on a clock that steps advance."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.handshake import LeaseName
from kvferry.scheduler.requests import LeaseState
from tests.harness.core.node import side_channel
from tests.harness.core.scheduler import SchedulerEngine, tokens
from tests.ports import free_port

LEASE_S = 60.0
HEARTBEAT_S = LEASE_S / 6
ENDED = (LeaseState.HELD, LeaseState.ENDING)
REMOTE_DECODE = {"do_remote_decode": True}
PROMPT_TOKENS = 64
"""Four blocks."""


class Slow:
    """A producer with such a router, on its own clock, a second per step. Its workers report at once."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        engine: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        for module in (
            "connector.scheduler_side.hooks",
            "link.server",
        ):  # both wind the clock of leases
            monkeypatch.setattr(f"kvferry.{module}.time", clock)
        with side_channel(free_port()):
            self.engine = SchedulerEngine(
                "FerryConnector",
                module="kvferry.connector",
                role="kv_producer",
                extra={"kv_lease_duration": LEASE_S, **extra},
                **{"num_blocks": 33, "checks_steps": True, **(engine or {})},
            )
        self.side = self.engine.connector.scheduler_side

    def prefill(self, *names: str, length: int = PROMPT_TOKENS) -> None:
        for name in names:
            prompt = tokens(length, seed=10 + len(self.engine.answers))
            self.engine.add(name, prompt, REMOTE_DECODE, max_tokens=1)

    def step(self, count: int = 1, *, renew: Iterable[str] = ()) -> None:
        """Steps of a second; a consumer renews the leases of these requests before each."""
        for _ in range(count):
            self.now_s += 1.0
            for name in self.held.intersection(renew):
                self.side.leases.renew(self.lease(name))
            step = self.engine.schedule()
            self.engine.finish(step, over=step.ended)

    def lease(self, name: str) -> LeaseName:
        ticket = self.engine.answers[name].params["kvferry"]  # type: ignore[index]
        return LeaseName(slot=ticket["lease_slot"], epoch=ticket["lease_epoch"])

    def answered(self) -> int:
        return sum(
            answer.finish_reason is not None for answer in self.engine.answers.values()
        )

    def close(self) -> None:
        self.engine.close()

    @property
    def held(self) -> set[str]:
        return {lease.request_id for lease in self.side.leases.leases(*ENDED)}
