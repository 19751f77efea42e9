"""Files that are whole, damaged, foreign or hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.trace.report import as_json
from kvferry.trace.events import Dropped
from kvferry.trace.reading import InvalidTrace, read_recording
from kvferry.trace.summary import summarize
from tests.trace.simulated import BEGIN_NS, SimulatedProcess, Simulation, engine_pair


def one_handover() -> Simulation:
    simulation, producer, consumer = engine_pair(workers=2)
    simulation.handover(producer, consumer)
    return simulation


def one_process() -> tuple[SimulatedProcess, list[bytes]]:
    """With the lines of its file."""
    process = one_handover().engines[0].scheduler
    return process, process.lines().splitlines(keepends=True)


def read(folder: Path, lines: list[bytes]) -> tuple[int, list[str]]:
    """The events and the problems of a file with these lines; the problems without the file's path."""
    file = folder / "w.jsonl"
    file.write_bytes(b"".join(lines))
    recording = read_recording([file])
    (events,) = recording.processes.values()
    return len(events), [one.removeprefix(f"{file}: ") for one in recording.problems]


def test_folders_are_searched_to_the_bottom_and_nothing_is_read_twice(
    tmp_path: Path,
) -> None:
    simulation = one_handover()
    simulation.write(tmp_path / "deep" / "er")
    (tmp_path / "deep" / "notes.txt").write_text("no trace")
    (tmp_path / "again").symlink_to(tmp_path / "deep" / "er" / "p")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    file = next((tmp_path / "deep" / "er" / "p").glob("scheduler*"))
    (tmp_path / "link.jsonl").symlink_to(file)
    recording = read_recording([tmp_path, tmp_path / "deep", file])
    written = {one.started: one.in_order() for one in simulation.processes()}
    assert recording.processes == written
    assert recording.problems == []


def test_both_halves_of_a_file_that_was_full_are_one_process(tmp_path: Path) -> None:
    process, (header, *lines) = one_process()
    (tmp_path / "w.jsonl").write_bytes(header + b"".join(lines[2:]))
    (tmp_path / "w.old.jsonl").write_bytes(header + b"".join(lines[:2]))
    recording = read_recording([tmp_path])
    assert recording.processes == {process.started: process.in_order()}


def test_copies_of_a_file_are_shown_like_one(tmp_path: Path) -> None:
    simulation = one_handover()
    simulation.write(tmp_path)
    once = as_json(summarize(read_recording([tmp_path])), 1)
    for number, process in enumerate(simulation.processes()):
        first_lines = process.lines().splitlines(keepends=True)[:3]
        (tmp_path / f"earlier{number}.jsonl").write_bytes(b"".join(first_lines))
        (tmp_path / f"later{number}.jsonl").write_bytes(process.lines())
    assert as_json(summarize(read_recording([tmp_path])), 1) == once


@pytest.mark.parametrize("num_cut", [0, 1, 5, 40])
def test_of_a_killed_process_only_the_line_that_it_wrote_is_lost(
    tmp_path: Path, num_cut: int
) -> None:
    _, lines = one_process()
    lines[-1] = lines[-1][: -1 - num_cut]
    num_events, problems = read(tmp_path, lines)
    if num_cut:
        left_out = f"line {len(lines)} left out: Input data was truncated"
        assert (num_events, problems) == (len(lines) - 2, [left_out])
    else:
        assert (num_events, problems) == (len(lines) - 1, [])


_FINISHED = b'{"event":"finished",'
_STEP = b'{"event":"prefill_step","at_ns":1,"tokens":1,"lease":'
_LOADED = b'{"event":"load_ended","at_ns":1,"request":"r","producer":"p","stages":['
_CHUNKS = b",".join([b'{"stop_token":1,"begun_ns":1,"ended_ns":2}'] * 65)
HOSTILE_LINES = {
    "bytes": (b"\xff\xfe\x00", "malformed"),
    "deep": (b'{"event":' * 100_000, "recursion"),
    "unknown": (b'{"event":"unheard_of","at_ns":1}', "'unheard_of'"),
    "negative": (_FINISHED + b'"at_ns":-1,"request":"r"}', "`$.at_ns`"),
    "stage": (_LOADED + b'{"stage":"</rect>","begun_ns":1,"ended_ns":2}]}', "</rect>"),
    "no lease": (_STEP + b'{"boot":"","epoch":"</g>"}}', "`$.lease.boot`"),
    "many chunks": (_LOADED + b'],"chunks":[' + _CHUNKS + b"]}", "`$.chunks`"),
    "huge": (_FINISHED + b'"at_ns":1e400,"request":"r"}', "`$.at_ns`"),
    "long id": (
        _FINISHED + b'"at_ns":1,"request":"' + b"r" * 5000 + b'"}',
        "`$.request`",
    ),
    "surrogate": (_FINISHED + b'"at_ns":1,"request":"\\ud800"}', "truncated"),
    "long line": (b"x" * (3 << 20), "malformed"),
    "long name": (b'{"event":"' + b"x" * (3 << 20) + b'"}', "xxx"),
}


@pytest.mark.parametrize("kind", HOSTILE_LINES)
def test_a_hostile_line_is_named_and_all_others_are_read(
    tmp_path: Path, kind: str
) -> None:
    hostile, reason = HOSTILE_LINES[kind]
    _, lines = one_process()
    bad = hostile + b"\n"
    num_events, (problem,) = read(tmp_path, [*lines[:3], bad, *lines[3:], b"\n", bad])
    assert num_events == len(lines) - 1
    assert problem.startswith("line 4 and 1 more left out: ")
    assert reason in problem
    assert len(problem) < 300


def test_what_a_later_version_wrote_is_left_out_by_name(tmp_path: Path) -> None:
    _, lines = one_process()
    later = [lines[0].replace(b'"trace_version":1', b'"trace_version":2'), *lines[1:]]
    version = "trace_version 2, and this command reads 1"
    (tmp_path / "later.jsonl").write_bytes(b"".join(later))
    with pytest.raises(InvalidTrace, match=version):
        read_recording([tmp_path])
    left_out = f"line 1 and {len(lines) - 1} more left out: {version}"
    assert read(tmp_path, [*later, *lines]) == (len(lines) - 1, [left_out])
    num_events, _ = read(tmp_path, [*lines, *later])
    assert num_events == len(lines) - 1


def test_events_before_the_first_line_belong_to_no_process(tmp_path: Path) -> None:
    _, (header, *lines) = one_process()
    num_events, (problem,) = read(tmp_path, [*lines[:2], header, *lines[2:]])
    assert num_events == len(lines) - 2
    assert problem.startswith("line 1 and 1 more left out: no line before it says")


def test_what_the_recorder_lost_is_reported(tmp_path: Path) -> None:
    process, _ = one_process()
    for number in (1, 2):
        process.record(Dropped, BEGIN_NS + number, count=17)
    lines = process.lines().splitlines(keepends=True)
    assert read(tmp_path, lines) == (len(lines) - 3, ["lacks 34 events that were lost"])


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "."])
def test_without_any_trace_the_path_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match=r"^DIR is "):
        read_recording([tmp_path / path])


@given(st.binary(max_size=400), st.integers(0, 10), st.integers(0, 400))
def test_no_bytes_stop_the_reading(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, line: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    one_handover().write(folder)
    _, lines = one_process()
    index = min(line, len(lines) - 1)
    lines[index] = lines[index][:at] + junk + lines[index][at:]
    (folder / "junk.jsonl").write_bytes(b"".join(lines))
    recording = read_recording([folder])
    summarize(recording)
    assert len(recording.processes) >= 5
