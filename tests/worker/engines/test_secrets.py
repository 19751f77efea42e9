"""Engines that share secrets, and the rotation of one: at every step of it every engine reads from every other."""

from __future__ import annotations

import time
from dataclasses import replace

from kvferry.link.secrets import Secrets
from kvferry.protocol.handshake import LeaseName
from kvferry.scheduler.requests import PromptKind
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine
from tests.harness.rig import Rig
from tests.link.secret_files import NEW, OLD

STEPS: tuple[Secrets, ...] = ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))
"""The secrets in every engine's file, one step of the rotation after the other; see docs/operations.md."""

LEASE_S = 60.0
"""So long that no lease runs out, however slow the machine is; leases of turns are renewed at once all the same."""


class Fleet:
    """Engines that are restarted one by one, each at its address."""

    def __init__(self, rig: Rig, names: str) -> None:
        self._rig = rig
        self._renewed: set[tuple[str, int]] = set()
        self.engines = {name: self._start(name, STEPS[0]) for name in names}

    def restart(self, name: str, secrets: Secrets) -> None:
        port = self.engines[name].port
        self._rig.retire(self.engines[name])
        self.engines[name] = self._start(name, secrets, port)

    def check(self, name: str, seed: int) -> None:
        """Check that this engine and every other read from each other, and renew and give back each other's leases."""
        others = [
            (self.engines[name], engine)
            for other, engine in self.engines.items()
            if other != name
        ]
        pairs = [*others, *((engine, this) for this, engine in others)]
        unread = [producer.prefill(tokens=10, seed=seed) for producer, _ in pairs]
        for offer, (_, consumer) in zip(unread, pairs, strict=True):
            now_s = time.monotonic()
            assert (
                consumer.loads.offer(
                    f"waits-{offer.request_id}",
                    offer.params,
                    10,
                    now_s,
                    kind=PromptKind.TURN,
                )
                is None
            )
        wanted = {
            (producer.name, offer.slot)
            for offer, (producer, _) in zip(unread, pairs, strict=True)
        }
        self._renewed.clear()
        self._rig.step_until(
            lambda: wanted <= self._renewed, "every lease is renewed", 30.0
        )
        for offer, (producer, consumer) in zip(unread, pairs, strict=True):
            consumer.loads.finished(f"waits-{offer.request_id}")  # it was aborted
            self._rig.step_until(
                lambda: offer.request_id in producer.seen.sent,  # noqa: B023
                "it is given back",
                30.0,
            )
            assert producer.counters.total("leases_released", "expired") == 0
            self._rig.transfer(producer, consumer, seed=seed)
            assert consumer.counters.total("side_channel_errors") == 0

    def _start(self, name: str, secrets: Secrets, port: int | None = None) -> Engine:
        settings = replace(SETTINGS, secrets=secrets, handshake_timeout_s=20.0)
        engine = self._rig.engine(name, settings=settings, lease_s=LEASE_S, port=port)
        renew = engine.leases.renew

        def note(name: LeaseName, received_s: float | None = None) -> bool:
            self._renewed.add((engine.name, name.slot))
            return renew(name, received_s)

        engine.leases.renew = note  # type: ignore[method-assign]
        return engine


def test_prompts_are_handed_over_and_leases_renewed_at_every_moment_of_a_rotation(
    rig: Rig,
) -> None:
    fleet, seed = Fleet(rig, "ABC"), 1
    for name in "ABC":
        fleet.check(name, seed)
    for secrets in STEPS[1:]:
        for name in "ABC":
            seed += 1
            fleet.restart(name, secrets)
            fleet.check(name, seed)
