"""`kvferry trace`, used like an operator does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.formatting import format_time
from kvferry.cli.trace.command import HANDOVERS_OF_A_TRACE
from kvferry.cli.trace.report import short_id
from tests.cli.command import refused, run
from tests.trace.example import STREAMED, write_example
from tests.trace.simulated import MS, Simulation, Times
from tests.trace.test_perfetto import check_format

HOSTILE = "</title><script>alert(1)</script>\"'&amp;\x1b[31m\u202e\x00"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("traces"))


def test_with_names_as_long_as_the_routers_and_vllms_no_column_disappears(
    tmp_path: Path,
) -> None:
    simulation = Simulation()
    producer = simulation.engine("a735d857-d2af-4617-9d15-41517f886b45")
    consumer = simulation.engine("4e9a2461-b3f4-4eea-bc38-90ee73fc14d4_dp1")
    times = Times(stages={0: {"connecting": 41 * MS}})
    request = f"cmpl-{'f44cb7e2' * 4}-0-a5dcd2ec"
    simulation.handover(producer, consumer, times=times, request=request)
    out = run("trace", str(simulation.write(tmp_path)), columns=40).out
    columns = {"engines", "tokens", "handover", "cause", "result"}
    assert {"a735d857", "4e9a2461", *columns} <= {*out.split()}
    assert "a735d857 → 4e9a2461_dp1" in run("trace", str(tmp_path), columns=140).out
    out = run("trace", str(tmp_path)).out
    phases = {"router", "connecting", "reading", "other"}
    assert phases <= {*out.partition("their phases")[2].split()}, "no word is folded"


def asked(*arguments: str) -> dict[str, Any]:
    """The answer as JSON."""
    answer: dict[str, Any] = json.loads(run("trace", *arguments, "--json").out)
    return answer


def test_the_tables_have_as_many_rows_as_asked_and_name_the_cause_and_its_worker(
    example: Path,
) -> None:
    out = run("trace", str(example), "--slowest", "2", columns=120).out
    phases, slowest, columns = out.split(":\n\n")
    assert "second fence" in phases
    assert "decode queue 64 ms" in slowest
    assert "reading 55 ms of tp1" in slowest
    assert slowest.count("cmpl-") == columns.count("cmpl-") == 2


def test_one_slow_request_is_found_by_the_id_that_the_router_gave_it(
    example: Path,
) -> None:
    answer = asked(str(example), "--request", "7c1e-1012")
    (slow,) = answer["slowest"]
    engines = (slow["producer"], slow["consumer"])
    assert (*engines, slow["outcome"]) == ("prefill-0", "decode-0", "loaded")
    assert slow["cause"] == "router"
    assert {"phase": "router", "begun_ms": 0.0, "ended_ms": 33.0} in slow["phases"]
    assert slow["bytes"] == 1024 * 131072
    assert [worker["place"] for worker in slow["workers"]] == ["tp0", "tp1"]
    assert asked(str(example), "--request", slow["consumer_request"]) == answer


def test_of_a_request_that_was_read_while_it_was_computed_steps_and_reads_are_listed(
    example: Path,
) -> None:
    """Their contents are tested in tests/trace/test_handover.py."""
    chosen = (str(example), "--request", f"7c1e-{1000 + STREAMED}")
    assert "1.07 GB, 87% early" in run("trace", *chosen, columns=140).out
    (streamed,) = asked(*chosen)["slowest"]
    steps = streamed["steps"]
    tokens = [1024 * number for number in range(1, 9)]
    assert [step["stop_token"] for step in steps] == tokens
    assert (steps[0]["phase"], steps[-1]["ended_ms"]) == ("prefill_step", 0)
    for worker in streamed["workers"]:
        begins = [chunk["begun_ms"] for chunk in worker["chunks"]]
        assert begins == [step["ended_ms"] for step in steps]
        assert worker["early_bytes"] * 2 == streamed["early_bytes"]


def test_the_answer_as_json_has_the_fields_of_its_page_and_as_many_rows_as_asked(
    example: Path,
) -> None:
    answer = asked(str(example), "--slowest", "3")
    counts = (answer["kvferry_trace"], answer["handovers"], answer["processes"])
    assert counts == (1, 25, 10)
    assert sum(answer["outcomes"].values()) == 25
    assert answer["phases"]["prefill"]["count"] == 25
    assert len(answer["slowest"]) == 3
    assert len(answer["notes"]) == 2
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    documented = page.partition('{"kvferry_trace"')[2]
    slow = answer["slowest"][0]
    for part in (slow, slow["workers"][0], answer["phases"]["prefill"]):
        assert [name for name in part if f"`{name}`" not in documented] == []


def test_without_a_handover_there_are_no_tables_but_what_was_damaged(
    example: Path, tmp_path: Path
) -> None:
    first_line = (
        next(example.rglob("*.jsonl")).read_bytes().splitlines(keepends=True)[0]
    )
    (tmp_path / "a.jsonl").write_bytes(first_line + b"no event\n")
    ran = run("trace", str(tmp_path))
    assert ran.code == 0
    said, note = ran.out.split("\n\n")
    assert said == "no handover was recorded by 1 process"
    assert "line 2 left out: JSON is malformed" in " ".join(note.split())


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_one_file_for_perfetto_has_every_request(
    example: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    ran = run("trace", str(example), "-o", str(out))
    written = f"\nwritten for ui.perfetto.dev: {out}\n"
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith(written)
    content = out.read_bytes()
    if name.endswith(".gz"):
        content = gzip.decompress(content)
    events = json.loads(content)["traceEvents"]
    check_format(events)
    requests = {event["name"][:14] for event in events if "cmpl-" in event["name"]}
    assert requests == {f"cmpl-7c1e-{number}" for number in range(1000, 1025)}
    beside_json = run("trace", str(example), "--json", "-o", str(out))
    assert json.loads(beside_json.out)["handovers"] == 25
    assert beside_json.err == written


def test_a_very_long_recording_is_cut_to_what_a_viewer_opens(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANDOVERS_OF_A_TRACE == 10_000
    monkeypatch.setattr("kvferry.cli.trace.command.HANDOVERS_OF_A_TRACE", 2)
    ran = run("trace", str(example), "-o", str(tmp_path / "a.json"))
    assert "(the 2 slowest of 25 handovers)" in ran.out
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "b"]
    assert names.count("handovers") == 2


def test_names_of_clients_are_text_without_control_characters(tmp_path: Path) -> None:
    simulation = Simulation()
    producer = simulation.engine("p<script>&\"'")
    consumer = simulation.engine("d</svg>", workers=2, host="h<b>&")
    simulation.handover(
        producer, consumer, request=HOSTILE, decode_request="d" + HOSTILE
    )
    simulation.handover(
        producer,
        consumer,
        request="x" + HOSTILE,
        reason="<i>&",
        recomputed="<b onclick=x>",
    )
    consumer.workers[0].restarted(place="<u>&")
    for number, process in enumerate(simulation.processes()):
        unknown = b'{"event":"<script>alert(2)</script>\\u202e"}\n'
        (tmp_path / f"{number}.jsonl").write_bytes(process.lines() + unknown)
    out = tmp_path / "a.json"
    ran = run("trace", str(tmp_path), "-o", str(out))
    assert (ran.code, ran.err) == (0, "")
    for shown in (ran.out, run("trace", str(tmp_path), "--json").out):
        assert shown.replace("\n", "").isprintable(), (
            "nothing reorders or hides what a reader sees"
        )
    events = json.loads(out.read_text())["traceEvents"]
    check_format(events)
    assert HOSTILE in {event["name"] for event in events}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (
            ["nowhere"],
            "trace: DIR is 'nowhere'; expected a folder or a file that exists",
        ),
        (["{empty}"], "files *.jsonl with traces"),
        (["{example}", "--request", "unheard of"], "--request is 'unheard of'"),
        (["{example}", "--slowest", "0"], "--slowest is '0'"),
        *(
            (
                ["{example}", "-o", out],
                f"-o is '{out}'; expected a file .json or .json.gz",
            )
            for out in ("", "x.svg", "x.html", "out", "out/", "x.gz")
        ),
        (
            ["{example}", "-o", "/proc/version/x.json"],
            "expected a file that can be written",
        ),
        (
            ["{example}", "-o", "/nowhere/x.json.gz"],
            "expected a file that can be written",
        ),
    ],
)
def test_an_error_is_reported_in_one_line(
    arguments: list[str], field: str, example: Path, tmp_path: Path
) -> None:
    assert field in refused(
        "trace",
        *(argument.format(example=example, empty=tmp_path) for argument in arguments),
    )


@pytest.mark.parametrize(
    ("nanoseconds", "formatted"),
    [
        (0, "0 µs"),
        (850, "0.85 µs"),
        (85_000, "85 µs"),
        (4_212_345, "4.21 ms"),
        (1_300_000_000, "1.3 s"),
        (720e9, "12 min"),
    ],
)
def test_formatted_durations(nanoseconds: float, formatted: str) -> None:
    assert format_time(nanoseconds) == formatted


def test_the_routers_prefix_of_an_id_is_not_shown() -> None:
    routed = (
        "chatcmpl-___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_1f0c99-5a2b"
    )
    assert short_id(routed) == "1f0c99-5a2b"
    assert len(short_id("x" * 300)) == 25
    assert short_id("cmpl-7-0") == "cmpl-7-0"
