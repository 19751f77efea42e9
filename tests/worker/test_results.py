"""Results for the step thread, which may wait for a load if it has nothing else to do.

The watchdog: every load is reported once, in time, and its blocks stay out of use until they are safe.
"""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import SLACK_S, LoadWatchdog, ResultBox, StepResults

LONG_S = 30.0


def end_load(box: ResultBox, *, well: bool) -> None:
    with box as results:
        if well:
            results.loaded.add("one")
        else:
            results.failed["one"] = FailureReason.TRANSFER


@pytest.mark.parametrize("well", [True, False])
def test_who_waits_for_a_load_goes_on_when_one_has_ended(well: bool) -> None:
    box = ResultBox()
    ends = threading.Thread(target=end_load, args=(box,), kwargs={"well": well})
    started_s = time.monotonic()
    ends.start()
    taken = box.take(LONG_S)
    ends.join()
    assert time.monotonic() - started_s < LONG_S
    assert taken.loaded | taken.failed.keys() == {"one"}


def test_other_results_end_no_wait() -> None:
    box = ResultBox()
    with box as results:
        results.sent.add("lease")
    started_s = time.monotonic()
    assert box.take(0.05).sent == {"lease"}
    assert time.monotonic() - started_s >= 0.05


def test_the_end_of_a_load_is_notified_once() -> None:
    notified: list[None] = []
    box = ResultBox()
    box.notify = lambda: notified.append(None)
    end_load(box, well=True)
    with box as results:
        results.sent.add("lease")
    assert len(notified) == 1
    end_load(box, well=False)
    assert len(notified) == 2
    box.take()
    end_load(box, well=True)
    assert len(notified) == 3


TIMEOUT_S = 5.0
LATE_S = TIMEOUT_S + SLACK_S


class WatchedLoads:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.turned_s = 100.0, 100.0
        monkeypatch.setattr(
            "kvferry.worker.loads.results.time.monotonic", lambda: self.now_s
        )
        self.watchdog = LoadWatchdog(TIMEOUT_S)

    def poll(self, **values: object) -> StepResults:
        results = StepResults(**values)  # type: ignore[arg-type]
        self.watchdog.poll(results, self.turned_s)
        return results

    def poll_twice(self) -> StepResults:
        """Find the thread stuck now and a little later."""
        assert not self.poll().failed
        self.now_s += SLACK_S
        return self.poll()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> WatchedLoads:
    return WatchedLoads(monkeypatch)


def test_what_the_transfer_thread_says_in_time_is_passed_on_as_it_is(
    scene: WatchedLoads,
) -> None:
    scene.watchdog.ordered(["good", "bad", "alive"])
    scene.now_s += LATE_S - 0.01
    failed = {"bad": FailureReason.FENCE, "alive": FailureReason.DEADLINE}
    results = scene.poll(
        loaded={"good"}, failed=dict(failed), still_written=frozenset({"alive"})
    )
    assert (results.loaded, results.failed, results.still_written) == (
        {"good"},
        failed,
        frozenset({"alive"}),
    )
    scene.now_s += 1000.0
    results = scene.poll()
    assert (results.loaded, results.failed, results.still_written) == (
        set(),
        {},
        None,
    ), "nothing is reported twice"
    assert scene.poll(still_written=frozenset()).still_written == frozenset()


def test_a_load_without_a_report_fails_after_its_deadline_and_its_blocks_are_alive(
    scene: WatchedLoads,
) -> None:
    scene.watchdog.ordered(["stuck"])
    scene.now_s += 1.0
    scene.now_s += 1.0
    scene.watchdog.ordered(["later"])
    scene.now_s += LATE_S - 2.01
    assert not scene.poll().failed
    scene.now_s += 0.01
    results = scene.poll_twice()
    assert results.failed == {"stuck": FailureReason.DEADLINE}
    assert results.still_written == frozenset({"stuck"}), (
        "in the same report, or its blocks could be given away in between"
    )
    assert results.counts == {"quarantined_loads": 1}
    results = scene.poll()
    assert (results.failed, results.still_written) == ({}, None)
    scene.now_s += 1.0
    assert scene.poll().still_written == frozenset({"stuck", "later"})


def test_as_long_as_the_thread_turns_it_judges_progress_itself(
    scene: WatchedLoads,
) -> None:
    scene.watchdog.ordered(["slow"])
    scene.now_s += 10 * LATE_S
    scene.turned_s = scene.now_s - LATE_S + 0.01
    assert not scene.poll().failed
    scene.now_s += 0.01
    assert scene.poll_twice().failed == {"slow": FailureReason.DEADLINE}


def test_a_pause_of_the_whole_process_fails_no_load(scene: WatchedLoads) -> None:
    """The step thread is the first to go on, before the transfer thread has turned."""
    scene.watchdog.ordered(["paused"])
    for _ in range(3):
        scene.now_s += 10 * LATE_S
        assert not scene.poll().failed
        scene.now_s += SLACK_S / 2
        scene.turned_s = scene.now_s
        assert not scene.poll().failed


@pytest.mark.parametrize("late", ["loaded", "failed"])
def test_what_the_thread_says_of_it_later_is_not_reported_again_and_frees_the_blocks(
    scene: WatchedLoads, late: str
) -> None:
    scene.watchdog.ordered(["stuck"])
    scene.now_s += LATE_S
    assert scene.poll_twice().failed
    said = (
        {"loaded": {"stuck"}}
        if late == "loaded"
        else {"failed": {"stuck": FailureReason.TRANSFER}}
    )
    results = scene.poll(**said)
    assert (results.loaded, results.failed, results.still_written) == (
        set(),
        {},
        frozenset(),
    )


def test_what_is_in_the_threads_quarantine_by_then_stays_alive_without_a_gap(
    scene: WatchedLoads,
) -> None:
    scene.watchdog.ordered(["stuck"])
    scene.now_s += LATE_S
    assert scene.poll_twice().still_written == frozenset({"stuck"})
    results = scene.poll(
        failed={"stuck": FailureReason.DEADLINE}, still_written=frozenset({"stuck"})
    )
    assert (results.failed, results.still_written) == ({}, None), "it is alive still"
    assert scene.poll(still_written=frozenset()).still_written == frozenset()
