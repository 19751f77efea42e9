"""A recorder costs its caller an append; the file of a process is its own, bounded, and whole after a full disk."""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.protocol.errors import InvalidConfig
from kvferry.trace import recorder as module
from kvferry.trace.events import (
    AnyEvent,
    Dropped,
    Finished,
    ProcessRole,
    ProcessStarted,
)
from kvferry.trace.recorder import SMALLEST_BYTES, Recorder, TraceFile


class Kept:
    """A sink that keeps everything, fails with some items, and can be set to wait."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.lost: list[int] = []
        self.bad: set[int] = set()
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
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


def record_one_by_one(recorder: Recorder[int], sink: Kept) -> None:
    """Three items, each in a batch of its own."""
    for number in range(3):
        sink.entered.clear()
        recorder.record(number)
        assert sink.entered.wait(20.0)


def test_everything_arrives_in_its_order_and_the_writer_ends() -> None:
    sink = Kept()
    recorder = Recorder(sink)
    record_one_by_one(recorder, sink)
    for number in range(3, 1000):
        recorder.record(number)
    recorder.close()
    recorder.close()
    assert sink.items == list(range(1000))
    assert sink.closed_by == ["kvferry-trace"]
    assert recorder.num_lost == 0


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
        record_one_by_one(recorder, sink)
        recorder.close()
    assert recorder.num_lost == 2
    assert (sink.items, sink.lost) == ([2], [2])
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


# The file of a process.

STARTED = ProcessStarted(
    at_ns=1_795_345_244 * 10**9,
    trace_version=1,
    part=ProcessRole.WORKER,
    engine_id="a/b engine",
    boot="",
    host="here",
    pid=77,
    place="tp0/pp1",
)
NAME = "kv_both-a_b_engine-worker-tp0_pp1-77-20261122T110044-"
decode = msgspec.json.Decoder(AnyEvent).decode


def new_file(folder: Path) -> TraceFile:
    return TraceFile(str(folder), "kv_both", STARTED, SMALLEST_BYTES)


def finished(number: int) -> Finished:
    return Finished(at_ns=number, request=f"request-{number}")


def events(path: Path) -> list[Any]:
    return [decode(line) for line in path.read_bytes().splitlines()]


def old_file(file: TraceFile) -> Path:
    return file.path.with_name(file.path.stem + ".old.jsonl")


def take_until(file: TraceFile, is_enough: Callable[[], bool]) -> int:
    """Write batches of 500 events, of which each is the next of the last; returns their number."""
    written = 0
    while not is_enough():
        file.take([finished(written + index) for index in range(500)], 0)
        written += 500
        sizes = [one.stat().st_size for one in file.path.parent.iterdir()]
        assert sum(sizes) <= SMALLEST_BYTES
    return written


def test_the_name_shows_the_process_and_no_other_user_may_read_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "traces"
    mask = os.umask(0)
    try:
        file = new_file(folder)
    finally:
        os.umask(mask)
    file.take([finished(1), finished(2)], 0)
    file.close()
    assert re.fullmatch(NAME + r"[0-9a-f]{8}\.jsonl", file.path.name)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert events(file.path) == [STARTED, finished(1), finished(2)]


def test_a_process_of_the_same_number_gets_a_file_of_its_own(tmp_path: Path) -> None:
    files = [new_file(tmp_path) for _ in range(2)]
    for number, file in enumerate(files):
        file.take([finished(number)], 0)
        file.close()
        assert events(file.path) == [STARTED, finished(number)]


def test_a_link_in_its_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / f"{NAME}guessed.jsonl").symlink_to(victim)
    with pytest.raises(InvalidConfig, match="File exists"):
        new_file(tmp_path)
    assert victim.read_text() == "untouched"


def test_the_newest_events_are_kept_within_the_bound(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    batches = iter(range(80))
    written = take_until(file, lambda: next(batches, None) is None)
    file.close()
    old = old_file(file)
    assert sorted(tmp_path.iterdir()) == sorted([old, file.path])
    before, now = events(old), events(file.path)
    assert before[0] == now[0] == STARTED
    numbers = [event.at_ns for event in before[1:] + now[1:]]
    assert numbers == list(range(numbers[0], written))
    assert len(numbers) > 5_000


def test_a_removed_file_is_made_again_in_time(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    file.path.unlink()
    take_until(file, file.path.exists)
    assert events(file.path)[0] == STARTED
    file.close()


def test_a_full_disk_leaves_whole_lines_and_the_next_batch_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = new_file(tmp_path)
    file.take([finished(1)], 0)
    write = os.write
    left = [9]

    def write_a_few_bytes(descriptor: int, lines: Any) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return write(descriptor, lines[: left.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_a_few_bytes)
        with pytest.raises(OSError, match="No space left"):
            file.take([finished(2), finished(3)], 0)
    file.take([finished(4)], 2)
    file.close()
    lost = Dropped(at_ns=4, count=2)
    assert events(file.path) == [STARTED, finished(1), lost, finished(4)]


def test_a_disk_that_is_full_as_a_file_begins_leaves_no_events_without_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = new_file(tmp_path)
    old = old_file(file)
    write = os.write

    def write_into_the_first_file(descriptor: int, lines: Any) -> int:
        if old.exists():
            raise OSError(28, "No space left on device")
        return write(descriptor, lines)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_into_the_first_file)
        with pytest.raises(OSError, match="No space left"):
            take_until(file, lambda: False)
    file.take([finished(7)], 500)
    file.close()
    assert events(file.path) == [STARTED, Dropped(at_ns=7, count=500), finished(7)]


@pytest.mark.parametrize("kind", ["a file", "a missing parent", "no files in it"])
def test_a_folder_that_cannot_be_used_stops_the_start_by_name(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").write_text("")
    folder = {
        "a file": tmp_path / "file",
        "a missing parent": tmp_path / "missing" / "there",
        "no files in it": Path("/proc"),  # for no user, not even root
    }[kind]
    expected = rf"trace_dir is .*{folder.name}.* expected a directory"
    with pytest.raises(InvalidConfig, match=expected):
        new_file(folder)
