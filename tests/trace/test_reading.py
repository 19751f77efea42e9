"""Files that are whole, damaged, foreign or hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.trace.report import as_json
from kvferry.trace.events import Dropped
from kvferry.trace.reading import InvalidTrace, Recording, read_recording
from kvferry.trace.summary import summarize
from tests.trace.simulated import BEGIN_NS, Simulation


def one_handover() -> Simulation:
    simulation = Simulation()
    simulation.handover(
        simulation.engine("prefill"), simulation.engine("decode", workers=2)
    )
    return simulation


def events(recording: Recording) -> int:
    return sum(map(len, recording.processes.values()))


def test_folders_are_searched_to_the_bottom_and_nothing_is_read_twice(
    tmp_path: Path,
) -> None:
    simulation = one_handover()
    simulation.write(tmp_path / "deep" / "er")
    (tmp_path / "deep" / "notes.txt").write_text("no trace")
    (tmp_path / "again").symlink_to(tmp_path / "deep" / "er" / "prefill")
    file = next((tmp_path / "deep" / "er" / "prefill").glob("*.jsonl"))
    recording = read_recording([tmp_path, tmp_path / "deep", file])
    assert len(recording.processes) == len(simulation.processes())
    assert events(recording) == sum(
        len(process.events) for process in simulation.processes()
    )
    assert recording.problems == ()


def test_both_halves_of_a_file_that_was_full_are_one_process(tmp_path: Path) -> None:
    process = one_handover().processes()[0]
    header, *lines = process.lines().splitlines(keepends=True)
    (tmp_path / "w.jsonl").write_bytes(header + b"".join(lines[2:]))
    (tmp_path / "w.old.jsonl").write_bytes(header + b"".join(lines[:2]))
    recording = read_recording([tmp_path])
    assert recording.processes == {process.started: process.in_order()}


def test_two_copies_of_a_file_are_shown_like_one(tmp_path: Path) -> None:
    simulation = one_handover()
    simulation.write(tmp_path)
    once = as_json(summarize(read_recording([tmp_path])), 1)
    for number, process in enumerate(simulation.processes()):
        first_lines = process.lines().splitlines(keepends=True)[:3]
        (tmp_path / f"earlier{number}.jsonl").write_bytes(b"".join(first_lines))
        (tmp_path / f"later{number}.jsonl").write_bytes(process.lines())
    assert as_json(summarize(read_recording([tmp_path])), 1) == once


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_of_a_killed_process_only_the_last_line_is_lost(
    tmp_path: Path, cut: int
) -> None:
    whole = one_handover().processes()[0].lines()
    (tmp_path / "w.jsonl").write_bytes(whole[: -1 - cut])
    recording = read_recording([tmp_path])
    assert events(recording) == whole.count(b"\n") - 2
    lines = whole.count(b"\n")
    (problem,) = recording.problems
    assert problem.endswith(f"w.jsonl: line {lines}: cut off in the middle")


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    whole = one_handover().processes()[0].lines()
    (tmp_path / "w.jsonl").write_bytes(whole[:-1])
    recording = read_recording([tmp_path])
    assert events(recording) == whole.count(b"\n") - 1
    assert recording.problems == ()


_FINISHED = b'{"event":"finished",'
_LOADED = b'{"event":"load_ended","at_ns":1,"request":"r","producer":"p",'
_CHUNK = b'{"stop_token":1,"begun_ns":1,"ended_ns":2}'
_UNKNOWN = "no event that this command knows"
HOSTILE_LINES = {
    "bytes": (b"\xff\xfe\x00", "no JSON"),
    "deep": (b'{"event":' * 100_000, ""),
    "unknown": (b'{"event":"unheard_of","at_ns":1}', _UNKNOWN),
    "negative": (_FINISHED + b'"at_ns":-1,"request":"r"}', _UNKNOWN),
    "unknown stage": (
        _LOADED + b'"stages":[{"stage":"</rect>","begun_ns":1,"ended_ns":2}]}',
        _UNKNOWN,
    ),
    "no lease": (
        b'{"event":"prefill_step","at_ns":1,"lease":{"boot":"","epoch":"</g>"},"tokens":1}',
        _UNKNOWN,
    ),
    "many chunks": (
        _LOADED + b'"stages":[],"chunks":[' + b",".join([_CHUNK] * 65) + b"]}",
        _UNKNOWN,
    ),
    "huge": (_FINISHED + b'"at_ns":1e400,"request":"r"}', ""),
    "long id": (_FINISHED + b'"at_ns":1,"request":"' + b"r" * 5000 + b'"}', _UNKNOWN),
    "surrogate": (_FINISHED + b'"at_ns":1,"request":"\\ud800"}', ""),
    "long line": (b"x" * (3 << 20), "no JSON"),
}


@pytest.mark.parametrize("kind", HOSTILE_LINES)
def test_a_hostile_line_is_named_and_all_others_are_read(
    tmp_path: Path, kind: str
) -> None:
    line, problem = HOSTILE_LINES[kind]
    lines = one_handover().processes()[0].lines().splitlines()
    (tmp_path / "w.jsonl").write_bytes(
        b"\n".join((*lines[:3], line, *lines[3:], line)) + b"\n"
    )
    recording = read_recording([tmp_path])
    assert events(recording) == len(lines) - 1
    (reported,) = recording.problems
    assert "w.jsonl: line 4 and 1 more: " in reported
    assert problem in reported
    assert len(reported) < 400 + len(str(tmp_path))


def test_what_a_later_version_wrote_is_left_out_by_name(tmp_path: Path) -> None:
    new, old = (one_handover().processes()[index].lines() for index in (0, 1))
    (tmp_path / "new.jsonl").write_bytes(
        new.replace(b'"trace_version":1', b'"trace_version":2')
    )
    with pytest.raises(
        InvalidTrace, match=r"trace_version 2, and this command reads 1"
    ):
        read_recording([tmp_path])
    (tmp_path / "old.jsonl").write_bytes(old)
    recording = read_recording([tmp_path])
    assert len(recording.processes) == 1
    (problem,) = recording.problems
    assert problem.endswith("line 1: trace_version 2, and this command reads 1")


def test_events_before_the_first_line_belong_to_no_process(tmp_path: Path) -> None:
    header, *lines = one_handover().processes()[0].lines().splitlines(keepends=True)
    (tmp_path / "w.jsonl").write_bytes(b"".join((*lines[:2], header, *lines[2:])))
    recording = read_recording([tmp_path])
    assert events(recording) == len(lines) - 2
    (problem,) = recording.problems
    assert "line 1 and 1 more: an event before any line that says which" in problem


def test_what_the_recorder_lost_is_reported(tmp_path: Path) -> None:
    simulation = one_handover()
    simulation.processes()[0].record(Dropped, BEGIN_NS + 1, count=17)
    (problem,) = read_recording([simulation.write(tmp_path)]).problems
    assert problem.endswith("line 3: 17 events were lost before it")


def test_pipes_and_links_to_nowhere_are_passed_over(tmp_path: Path) -> None:
    simulation = one_handover()
    simulation.write(tmp_path)
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert len(read_recording([tmp_path]).processes) == len(simulation.processes())


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "."])
def test_without_any_trace_the_path_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTrace, match=r"^DIR is "):
        read_recording([tmp_path / path])


@given(st.binary(max_size=400), st.integers(0, 10), st.integers(0, 400))
def test_no_bytes_stop_the_reading(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, line: int, at: int
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    simulation = one_handover()
    simulation.write(folder)
    lines = simulation.processes()[0].lines().splitlines(keepends=True)
    index = min(line, len(lines) - 1)
    lines[index] = lines[index][:at] + junk + lines[index][at:]
    (folder / "junk.jsonl").write_bytes(b"".join(lines))
    recording = read_recording([folder])
    summarize(recording)
    assert len(recording.processes) >= 4
