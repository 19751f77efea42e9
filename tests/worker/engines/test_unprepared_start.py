"""An engine that cannot prepare a first contact starts, and its first contact works as without preparation."""

from __future__ import annotations

import pytest

from kvferry.worker.peers.plan_cache import PlanCache
from tests.harness.rig import Rig


def test_an_engine_starts_and_loads_although_its_own_plan_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    producer, consumer = rig.engine("P"), rig.engine("C")
    monkeypatch.setattr("kvferry.worker.fabric.errors.internal_errors._quiet_until_s", 0.0)
    with monkeypatch.context() as failing:
        failing.setattr(PlanCache, "plan", fail)
        consumer.worker.add_siblings(consumer.description.workers)
    assert "a first contact could not be prepared" in caplog.text
    rig.transfer(producer, consumer, tokens=23, seed=3)
