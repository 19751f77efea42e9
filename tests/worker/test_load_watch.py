"""The step thread's view of loads: every one is reported once, in time, and its blocks stay out of use until they are
safe."""

from __future__ import annotations

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.watchdog import SLACK_S, LoadWatch

TIMEOUT_S = 5.0
LATE_S = TIMEOUT_S + SLACK_S


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("kvferry.worker.loads.watchdog.time.monotonic", lambda: self.now_s)
        self.watch = LoadWatch(TIMEOUT_S)

    def look(self, **results: object) -> StepResults:
        told = StepResults(**results)  # type: ignore[arg-type]
        self.watch.look(told)
        return told


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_the_transfer_thread_says_in_time_is_passed_on_as_it_is(scene: Scene) -> None:
    scene.watch.ordered(["good", "bad", "alive"])
    scene.now_s += LATE_S - 0.01
    failed = {"bad": FailureReason.FENCE, "alive": FailureReason.DEADLINE}
    told = scene.look(loaded={"good"}, failed=dict(failed), alive=frozenset({"alive"}))
    assert (told.loaded, told.failed, told.alive) == ({"good"}, failed, frozenset({"alive"}))
    scene.now_s += 1000.0
    told = scene.look()
    assert (told.loaded, told.failed, told.alive) == (set(), {}, None), "nothing is reported twice"
    assert scene.look(alive=frozenset()).alive == frozenset()


def test_a_load_of_which_nothing_is_heard_fails_after_its_deadline_and_its_blocks_are_alive(scene: Scene) -> None:
    scene.watch.ordered(["stuck"])
    scene.now_s += 1.0
    scene.watch.ordered(["later"])
    scene.now_s += LATE_S - 1.01
    assert not scene.look().failed
    scene.now_s += 0.01
    told = scene.look()
    assert told.failed == {"stuck": FailureReason.DEADLINE}
    assert told.alive == frozenset({"stuck"}), "in the same report, or its blocks could be given away in between"
    assert told.quarantined_loads == 1
    told = scene.look()
    assert (told.failed, told.alive) == ({}, None)
    scene.now_s += 1.0
    assert scene.look().alive == frozenset({"stuck", "later"})


@pytest.mark.parametrize("late", ["loaded", "failed"])
def test_what_the_thread_says_of_it_later_is_not_reported_again_and_frees_the_blocks(scene: Scene, late: str) -> None:
    scene.watch.ordered(["stuck"])
    scene.now_s += LATE_S
    assert scene.look().failed
    said = {"loaded": {"stuck"}} if late == "loaded" else {"failed": {"stuck": FailureReason.TRANSFER}}
    told = scene.look(**said)
    assert (told.loaded, told.failed, told.alive) == (set(), {}, frozenset())


def test_what_is_in_the_threads_quarantine_by_then_stays_alive_without_a_gap(scene: Scene) -> None:
    scene.watch.ordered(["stuck"])
    scene.now_s += LATE_S
    assert scene.look().alive == frozenset({"stuck"})
    told = scene.look(failed={"stuck": FailureReason.DEADLINE}, alive=frozenset({"stuck"}))
    assert (told.failed, told.alive) == ({}, None), "it is alive still"
    assert scene.look(alive=frozenset()).alive == frozenset()


def test_it_knows_whether_a_load_is_awaited(scene: Scene) -> None:
    assert not scene.watch
    scene.watch.ordered(["one", "other"])
    scene.look(loaded={"one"})
    assert scene.watch
    scene.look(failed={"other": FailureReason.FENCE})
    assert not scene.watch
