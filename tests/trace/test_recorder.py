"""A recorder costs its caller an append, and a failing sink does not stop the caller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from kvferry.trace import recorder as module
from kvferry.trace.recorder import Recorder


class Kept:
    """A sink that keeps everything, fails with some items, and can be set to wait."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.lost: list[int] = []
        self.bad: set[int] = set()
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.closed_by: list[str] = []

    def take(self, items: Sequence[int], lost: int) -> None:
        self.entered.set()
        assert self.may_go_on.wait(20.0)
        if self.bad & set(items):
            raise OSError(28, "No space left on device")
        self.items += items
        self.lost.append(lost)

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def test_everything_arrives_in_its_order_and_the_writer_ends() -> None:
    sink = Kept()
    recorder = Recorder(sink)
    for number in range(1000):
        recorder.record(number)
    recorder.close()
    recorder.close()
    assert sink.items == list(range(1000))
    assert sink.closed_by == ["kvferry-trace"]
    assert recorder.num_lost == 0


def test_what_is_recorded_is_written_without_a_close() -> None:
    sink = Kept()
    recorder = Recorder(sink)
    for number in range(3):
        sink.entered.clear()
        recorder.record(number)
        assert sink.entered.wait(20.0)
    recorder.close()
    assert sink.items == [0, 1, 2]


def test_what_a_slow_sink_leaves_behind_is_dropped_and_counted_and_reported() -> None:
    sink = Kept()
    sink.may_go_on.clear()
    recorder = Recorder(sink, most_waiting=10)
    recorder.record(0)
    assert sink.entered.wait(20.0)
    for number in range(1, 26):
        recorder.record(number)
    assert recorder.num_lost == 15
    sink.may_go_on.set()
    recorder.close()
    assert sink.items == list(range(11))
    assert sink.lost == [0, 15]


def test_a_sink_that_fails_loses_its_batch_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    sink.bad = {0, 1}
    recorder = Recorder(sink)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            # Each in a batch of its own.
            sink.entered.clear()
            recorder.record(number)
            assert sink.entered.wait(20.0)
        recorder.close()
    assert recorder.num_lost == 2
    assert sink.items == [2]
    assert sink.lost == [2]
    (warning,) = caplog.records
    assert "No space left" in warning.getMessage()


def test_an_end_does_not_wait_for_a_sink_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    sink = Kept()
    sink.may_go_on.clear()
    recorder = Recorder(sink)
    recorder.record(1)
    assert sink.entered.wait(20.0)
    recorder.close()
    assert "are not written" in caplog.text
    sink.may_go_on.set()
