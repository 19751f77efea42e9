"""The pure parts of `bench.engine_contact`."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import engine_contact
from bench.engine_contact import Contact, ContactFigures, results_of
from bench.serve_setups import CALM, KVFERRY, Setup


def contacted(setup: Setup, *first_s: float, error: str = "") -> ContactFigures:
    return ContactFigures(setup, [Contact(one, (0.01, 0.01, 0.5)) for one in first_s], error=error)


@pytest.mark.parametrize(("peer_s", "is_met"), [(0.42, True), (0.39, False)])
def test_what_counts_is_a_quarter_of_what_the_peers_first_takes_longer(peer_s: float, is_met: bool) -> None:
    found = {"kvferry": contacted(KVFERRY, 0.11, 0.02, 0.9), "calm": contacted(CALM, peer_s)}
    (target,) = results_of(found, quick=False).targets
    assert target.name == "first contact, 5,500 blocks × 30 layers"
    assert target.met is is_met
    assert (target.measured, target.limit) == pytest.approx((100.0, 250 * (peer_s - 0.01)))


def test_connectors_take_turns_and_one_that_fails_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    async def measure(figures: ContactFigures, consumers: int, logs: Path) -> None:
        asked.append((figures.setup.name, consumers))
        if figures.setup is CALM:
            raise ValueError("it hangs")
        figures.contacts += [Contact(0.05, (0.01,))] * consumers

    monkeypatch.setattr(engine_contact, "measure_contacts", measure)
    results = engine_contact.run(tmp_path, quick=False)
    assert [name for name, _ in asked] == ["kvferry", "calm"] * 2
    assert results.tables[0].rows[0][1] == sum(count for name, count in asked if name == "kvferry")
    assert any("ended early: ValueError: it hangs" in note for note in results.notes)
