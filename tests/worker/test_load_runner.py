"""The runner resumes loads in turn, and releases the interpreter's lock for the step thread in between."""

from __future__ import annotations

import math
import time
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import InternalErrors
from kvferry.worker.loads import runner as load_runner
from kvferry.worker.loads.load import Load, LoadContext
from kvferry.worker.loads.results import ResultBox
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.loads.slot_watch import LoadSteps
from kvferry.worker.loads.state import LoadEvent, LoadState
from tests.promises import promise
from tests.worker.stub_loads import StubLoad


@pytest.fixture
def resumed() -> Counter[str]:
    return Counter()


@pytest.fixture
def box() -> ResultBox:
    return ResultBox()


@pytest.fixture
def reader() -> SimpleNamespace:
    """What the runner uses of it: none of its posts has released the interpreter's lock."""
    return SimpleNamespace(gil_released_at_s=-math.inf)


@pytest.fixture
def runner(
    resumed: Counter[str], box: ResultBox, reader: SimpleNamespace
) -> LoadRunner:
    """Three loads that are in flight for ever."""
    context = cast("LoadContext", SimpleNamespace(reader=reader, slot_reads=None))
    made = LoadRunner(context, box, timeout_s=60.0, max_loads=8)

    def steps(name: str) -> LoadSteps:
        while True:
            resumed[name] += 1
            yield None

    for name in "abc":
        load = cast("Load", StubLoad(name, steps(name)))
        made.loads.add(load)
        made.loads.apply(load, LoadEvent.BEGIN, 0.0)
    return made


def test_loads_that_do_not_fit_are_resumed_by_the_next_steps_each_once_a_round(
    runner: LoadRunner, resumed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_runner, "_STRETCH_S", 0.0)
    seen = []
    for _ in range(6):
        runner.step()
        seen.append((sum(resumed.values()), bool(runner.rest_of_round)))
    assert seen == [(1, True), (2, True), (3, False), (4, True), (5, True), (6, False)]
    assert resumed == {"a": 2, "b": 2, "c": 2}


def test_where_posts_let_go_of_the_lock_one_load_follows_another(
    runner: LoadRunner,
    resumed: Counter[str],
    reader: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_runner, "_STRETCH_S", 0.0)
    # As if a post had come back just now, every time.
    reader.gil_released_at_s = time.monotonic() + 60.0
    runner.step()
    assert resumed == {"a": 1, "b": 1, "c": 1}


def test_loads_with_an_internal_error_fill_the_log_with_no_tracebacks(
    runner: LoadRunner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> LoadSteps:
        yield None
        raise KeyError("a bug")

    monkeypatch.setattr(
        load_runner, "internal_errors", InternalErrors(load_runner.logger, 3600.0)
    )
    monkeypatch.setattr(load_runner, "_STRETCH_S", 60.0)
    for load in runner.loads.of(LoadState.RUNNING):
        load.resumed_steps = fail()
    for _ in range(2):
        runner.step()
    assert caplog.text.count("load failed (transfer): KeyError('a bug')") == 3
    assert caplog.text.count("Traceback") == 1
    assert "an internal error in a load" in caplog.text


@pytest.mark.parametrize("stretch_s", [0.0, 60.0])
def test_a_round_takes_the_time_of_all_its_stretches_and_not_what_lies_between_them(
    runner: LoadRunner, monkeypatch: pytest.MonkeyPatch, stretch_s: float
) -> None:
    now_s = 1000.0

    def slow() -> LoadSteps:
        nonlocal now_s
        while True:
            now_s += 0.25
            yield None

    monkeypatch.setattr(load_runner, "_STRETCH_S", stretch_s)
    monkeypatch.setattr(load_runner, "time", SimpleNamespace(monotonic=lambda: now_s))
    for load in runner.loads.of(LoadState.RUNNING):
        load.resumed_steps = slow()
    runner.step()
    while runner.rest_of_round:
        now_s += 10.0
        runner.step()
    assert runner.round_s == 0.75


class _Clock:
    """The runner's clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(
            load_runner, "time", SimpleNamespace(monotonic=lambda: self.now_s)
        )


@promise(5)
def test_a_pause_of_this_process_fails_no_load_and_time_awake_does(
    runner: LoadRunner, box: ResultBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch)
    runner.step()
    for _ in range(3):
        clock.now_s += 100 * runner.timeout_s
        runner.step()
    assert runner.loads.count(LoadState.RUNNING) == 3
    for _ in range(int(runner.timeout_s / 0.2)):
        clock.now_s += 0.2
        runner.step()
    assert not list(runner.begun())
    assert box.take().failed == dict.fromkeys("abc", FailureReason.DEADLINE)
