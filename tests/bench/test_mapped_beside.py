"""A decode step beside mapped loads, on the CPU: both are measured."""

from __future__ import annotations

import pytest
from bench.handover import TOKEN_BYTES
from bench.mapped_beside import ANY, Decoder, results_of, run
from bench.transfer_loads import Loads

from kvferry.protocol.orders import LoadOrder


def test_steps_are_measured_alone_and_beside_loads_from_mapped_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Loads.load
    mapped: list[int] = []

    def noted(loads: Loads, orders: list[LoadOrder]) -> float:
        seconds = load(loads, orders)
        mapped.extend(record.mapped_bytes for record in loads.records)
        return seconds

    monkeypatch.setattr(Loads, "load", noted)
    (found,) = run("cpu", 16, 3, Decoder("cpu", matrices=2, width=64))
    # A first load connects the producer, and a first one beside the steps is not counted.
    assert len(mapped) == 2 + len(found.load_ms) >= 3
    assert set(mapped[1:]) == {16 * TOKEN_BYTES}
    assert (found.programs, len(found.alone_ms), len(found.beside_ms)) == (ANY, 3, 3)
    results = results_of([found], "cpu", quick=True)
    assert len(results.tables[0].rows) == 1
    assert not results.targets, "the target is for a GPU"
