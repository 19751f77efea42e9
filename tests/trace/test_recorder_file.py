"""The file of a process: whose it is, who may read it, how large it grows, and what a full disk does to it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.protocol.errors import InvalidConfig
from kvferry.trace.events import (
    AnyEvent,
    Dropped,
    Finished,
    ProcessRole,
    ProcessStarted,
)
from kvferry.trace.recorder import SMALLEST_BYTES, TraceFile

DECODER = msgspec.json.Decoder(AnyEvent)
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


def finished(number: int) -> Finished:
    return Finished(at_ns=number, request=f"request-{number}")


def events(path: Path) -> list[Any]:
    return [DECODER.decode(line) for line in path.read_bytes().splitlines()]


def test_the_name_shows_the_process_and_no_other_user_may_read_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "traces"
    mask = os.umask(0)
    try:
        file = TraceFile(str(folder), "kv_both", STARTED)
    finally:
        os.umask(mask)
    file.take([finished(1), finished(2)], 0)
    file.close()
    assert (
        file.path
        == folder / "kv_both-a_b_engine-worker-tp0_pp1-77-20261122T110044.jsonl"
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert events(file.path) == [STARTED, finished(1), finished(2)]


def test_a_process_of_the_same_number_gets_a_file_of_its_own(tmp_path: Path) -> None:
    one, other = (TraceFile(str(tmp_path), "kv_both", STARTED) for _ in range(2))
    one.take([finished(1)], 0)
    other.take([finished(2)], 0)
    assert (events(one.path)[1:], events(other.path)[1:]) == (
        [finished(1)],
        [finished(2)],
    )
    one.close()
    other.close()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    expected = (
        tmp_path
        / "traces"
        / "kv_both-a_b_engine-worker-tp0_pp1-77-20261122T110044.jsonl"
    )
    expected.parent.mkdir()
    expected.symlink_to(victim)
    file = TraceFile(str(expected.parent), "kv_both", STARTED)
    file.close()
    assert victim.read_text() == "untouched"
    assert file.path != expected


def test_the_newest_events_are_kept_within_the_bound(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "kv_both", STARTED, SMALLEST_BYTES)
    written = 0
    while written < 40_000:
        file.take([finished(written + index) for index in range(500)], 0)
        written += 500
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= SMALLEST_BYTES
    file.close()
    old = file.path.with_name(file.path.stem + ".old.jsonl")
    assert sorted(tmp_path.iterdir()) == sorted([old, file.path])
    before, now = events(old), events(file.path)
    assert before[0] == now[0] == STARTED
    numbers = [event.at_ns for event in before[1:] + now[1:]]
    assert numbers == list(range(numbers[0], written))
    assert len(numbers) > 5_000


def test_a_removed_file_is_made_again_in_time(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "kv_both", STARTED, SMALLEST_BYTES)
    file.path.unlink()
    while not file.path.exists():
        file.take([finished(index) for index in range(500)], 0)
    assert events(file.path)[0] == STARTED
    file.close()


def test_a_full_disk_leaves_whole_lines_and_the_next_batch_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(str(tmp_path), "kv_both", STARTED)
    file.take([finished(1)], 0)
    write = os.write

    def a_few_bytes(left: list[int]) -> Callable[[int, Any], int]:
        def write_some(descriptor: int, lines: Any) -> int:
            if not left:
                raise OSError(28, "No space left on device")
            return write(descriptor, lines[: left.pop()])

        return write_some

    monkeypatch.setattr(os, "write", a_few_bytes([9]))
    with pytest.raises(OSError, match="No space left"):
        file.take([finished(2), finished(3)], 0)
    monkeypatch.undo()
    file.take([finished(4)], 2)
    file.close()
    assert events(file.path) == [
        STARTED,
        finished(1),
        Dropped(at_ns=4, count=2),
        finished(4),
    ]


def test_a_disk_that_is_full_as_a_file_begins_leaves_no_events_without_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(str(tmp_path), "kv_both", STARTED, SMALLEST_BYTES)
    old, write = file.path.with_name(file.path.stem + ".old.jsonl"), os.write

    def write_into_the_first_file(descriptor: int, lines: Any) -> int:
        if old.exists():
            raise OSError(28, "No space left on device")
        return write(descriptor, lines)

    def write_until_it_is_full() -> None:
        for _ in range(SMALLEST_BYTES):
            file.take([finished(index) for index in range(500)], 0)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_into_the_first_file)
        with pytest.raises(OSError, match="No space left"):
            write_until_it_is_full()
    file.take([finished(7)], 500)
    file.close()
    assert events(file.path) == [STARTED, Dropped(at_ns=7, count=500), finished(7)]


@pytest.mark.parametrize(
    "kind",
    ["a file", "a folder in a folder that is missing", "a folder that is not ours"],
)
def test_a_folder_that_cannot_be_used_stops_the_start_by_name(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "here"
    if kind == "a file":
        folder.write_text("")
    elif kind == "a folder that is not ours":
        folder = Path("/proc")  # no user, not even root, can make files there
    else:
        folder = folder / "there"
    with pytest.raises(
        InvalidConfig, match=rf"trace_dir is .*{folder.name}.* expected a directory"
    ):
        TraceFile(str(folder), "kv_both", STARTED)
