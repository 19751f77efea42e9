"""`kvferry trace`, used like an operator does."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from kvferry.cli.trace.command import HANDOVERS_OF_A_TRACE, PAGE, PICTURE, TRACE
from kvferry.cli.trace.report import format_time, short_id
from kvferry.trace.events import LoadEnded
from tests.cli.command import refused, run
from tests.trace.example import STREAMED, write_example
from tests.trace.simulated import MS, Simulation, Times

HOSTILE = """</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>"'&amp;]]><!--\x1b[31m\u202e\x00"""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("traces"))


class Tags(HTMLParser):
    """The elements and attributes of a page, with a check that every element is closed."""

    VOID = frozenset({"meta", "rect", "line", "polygon"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID or not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open += [tag] * (tag != "meta")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_everything_is_written_and_the_slowest_is_first_everywhere(
    example: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    ran = run("trace", str(example), "-o", str(out), columns=140)
    assert (ran.code, ran.err) == (0, "")
    assert sorted(file.name for file in out.iterdir()) == sorted((PAGE, PICTURE, TRACE))
    assert (
        ran.out.splitlines()[0]
        == "25 handovers of 10 processes: 23 loaded, 1 recomputed: fence, 1 not fetched: expired"
    )
    assert f"written: {out}" in ran.out
    order = [f"cmpl-7c1e-{number}-0" for number in (1005, 1007, 1000, 1012)]
    texts = (ran.out, (out / PAGE).read_text(), (out / PICTURE).read_text())
    for text in texts:
        places = [text.index(name) for name in order]
        assert places == sorted(places)
    (row,) = (line for line in ran.out.splitlines() if line.startswith("cmpl-7c1e-1005"))
    assert re.search(
        r"prefill-1 → decode-0 +1024 +71\.6 ms +decode queue 64 ms +134 MB at 29\.8 GB/s", row
    )
    assert "clocks of prefill-1 on host-of-prefill-1 and decode-0" in ran.out
    assert "recomputed: fence" in (out / PICTURE).read_text()


def test_the_tables_fit_80_columns_and_ids_stay_whole(example: Path) -> None:
    out = run("trace", str(example)).out
    assert max(map(len, out.splitlines())) <= 80
    assert len(re.findall(r"^cmpl-7c1e-10\d\d-0-[0-9a-f]{8} ", out, re.MULTILINE)) == 20


def test_with_names_as_long_as_the_routers_and_vllms_no_column_disappears(tmp_path: Path) -> None:
    simulation, ends = (
        Simulation(),
        ("a735d857-d2af-4617-9d15-41517f886b45", "4e9a2461-b3f4-4eea-bc38-90ee73fc14d4_dp1"),
    )
    producer, consumer = (simulation.engine(name) for name in ends)
    simulation.handover(producer, consumer, request=f"cmpl-{'f44cb7e2' * 4}-0-a5dcd2ec")
    out = run("trace", str(simulation.write(tmp_path)), columns=40).out
    assert {"a735d857", "4e9a2461", "engines", "tokens", "handover", "longest", "result"} <= {
        *out.split()
    }


def test_one_slow_request_is_found_by_the_id_that_the_router_gave_it(example: Path) -> None:
    ran = run("trace", str(example), "--request", "7c1e-1012", "--json")
    (one,) = json.loads(ran.out)["slowest"]
    assert (one["outcome"], one["producer"], one["consumer"]) == ("loaded", "prefill-0", "decode-0")
    longest = max(one["phases"][2:], key=lambda phase: phase["ended_ms"] - phase["begun_ms"])
    assert longest == {"phase": "router", "begun_ms": 0.0, "ended_ms": 33.0}
    assert one["bytes"] == 1024 * 131072
    assert [worker["place"] for worker in one["workers"]] == ["tp0", "tp1"]
    by_theirs = run("trace", str(example), "--request", one["consumer_request"], "--json")
    assert json.loads(by_theirs.out)["slowest"] == [one]


def test_of_a_request_that_was_read_while_it_was_computed_steps_and_reads_are_listed(
    example: Path,
) -> None:
    name = f"7c1e-{1000 + STREAMED}"
    (row,) = (
        line
        for line in run("trace", str(example), "--request", name, columns=140).out.splitlines()
        if name in line
    )
    assert re.search(r" 8192 +4\.47 ms +reading 3\.27 ms +1\.07 GB, 87% early", row)
    (one,) = json.loads(run("trace", str(example), "--request", name, "--json").out)["slowest"]
    assert one["early_bytes"] * 8 == one["bytes"] * 7
    steps, workers = one["steps"], one["workers"]
    assert [step["stop_token"] for step in steps] == [1024 * number for number in range(1, 9)]
    assert (steps[0]["phase"], steps[-1]["ended_ms"]) == ("prefill_step", 0)
    for worker in workers:
        assert [chunk["begun_ms"] for chunk in worker["chunks"]] == [
            step["ended_ms"] for step in steps
        ]
        assert (worker["early_bytes"] * 2, worker["restarts"]) == (one["early_bytes"], 0)


def test_the_answer_as_json_counts_everything_and_lists_as_many_as_asked(example: Path) -> None:
    answer = json.loads(run("trace", str(example), "--json", "--slowest", "3").out)
    assert (answer["kvferry_trace"], answer["handovers"], answer["processes"]) == (1, 25, 10)
    assert len(answer["slowest"]) == 3
    assert sum(answer["outcomes"].values()) == 25
    assert answer["phases"]["prefill"]["count"] == 25
    assert len(answer["notes"]) == 2


@pytest.mark.parametrize(
    ("name", "begins"), [("a.svg", "<?xml"), ("a.html", "<!DOCTYPE html>"), ("a.json", "{")]
)
def test_a_suffix_asks_for_one_file(example: Path, tmp_path: Path, name: str, begins: str) -> None:
    assert run("trace", str(example), "-o", str(tmp_path / name)).code == 0
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text().startswith(begins)


def test_the_picture_has_as_many_rows_as_asked(example: Path, tmp_path: Path) -> None:
    run("trace", str(example), "-o", str(tmp_path / "a.svg"), "--slowest", "4")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()  # noqa: S314
    said = "".join(root.itertext())
    assert "The 4 slowest of 25 handovers" in said
    assert "7c1e-1012" in said
    assert "7c1e-1009" not in said
    hints = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert any(hint.startswith("decode queue: 64 ms") for hint in hints)
    assert any(hint.startswith("tp1 reading: 55 ms") for hint in hints)


def test_an_unread_lease_does_not_shrink_the_bars_of_all_others(
    example: Path, tmp_path: Path
) -> None:
    """It was held for eight minutes, while handovers took milliseconds."""
    run("trace", str(example), "-o", str(tmp_path / "a.svg"), "--slowest", "25")
    said = [*ElementTree.parse(tmp_path / "a.svg").getroot().itertext()]  # noqa: S314
    assert {"not fetched: expired", "20 ms", "60 ms"} <= set(said)
    assert not {"100 s", "200 s", "400 s"} & set(said)


def test_the_page_loads_nothing_and_runs_nothing(example: Path, tmp_path: Path) -> None:
    run("trace", str(example), "-o", str(tmp_path / "a.html"))
    page = (tmp_path / "a.html").read_text()
    tags = Tags(page)
    assert tags.open == []
    assert not tags.names & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not tags.attributes & {"href", "src", "onclick", "onload", "onerror"}
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert page.count("<details>") == 25


def hostile(folder: Path) -> Path:
    simulation = Simulation()
    producer = simulation.engine("p<script>&\"'")
    consumer = simulation.engine("d</svg>", workers=2, host="h<b>&")
    simulation.handover(producer, consumer, request=HOSTILE, decode_request="d" + HOSTILE)
    simulation.handover(
        producer,
        consumer,
        MS,
        Times(),
        request="x" + HOSTILE,
        reason="<i>&",
        recomputed="<b onclick=x>",
    )
    consumer.workers[0].started = msgspec.structs.replace(consumer.workers[0].started, place="<u>&")
    for worker in consumer.workers:
        worker.events[:] = [event for event in worker.events if isinstance(event, LoadEnded)]
    for engine in simulation.engines:
        home = folder / str(len(engine.workers))
        home.mkdir(parents=True)
        for number, process in enumerate((engine.scheduler, *engine.workers)):
            (home / f"{number}.jsonl").write_bytes(
                process.lines() + b'{"event":"<script>alert(2)</script>"}\n'
            )
    return folder


def test_ids_of_clients_are_text_and_never_markup(tmp_path: Path) -> None:
    folder, out = hostile(tmp_path / "in"), tmp_path / "out"
    ran = run("trace", str(folder), "-o", str(out))
    assert (ran.code, ran.err) == (0, "")
    tags = Tags((out / PAGE).read_text())
    assert tags.open == []
    assert not tags.names & {"script", "img", "u"}
    assert not tags.attributes & {"onerror", "onclick"}
    assert any("</title></svg><script>alert(1)</script>" in said for said in tags.said)
    root = ElementTree.parse(out / PICTURE).getroot()  # noqa: S314
    names = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert names <= {"svg", "style", "rect", "text", "line", "title", "polygon"}
    document = json.loads((out / TRACE).read_text())
    assert any(HOSTILE in event["name"] for event in document["traceEvents"])
    as_json = run("trace", str(folder), "--json").out
    assert json.loads(as_json)
    for shown in (ran.out, as_json, (out / PAGE).read_text(), (out / PICTURE).read_text()):
        assert shown.replace("\n", "").isprintable(), (
            "nothing reorders, hides or controls what a reader sees"
        )
    assert "\\u202e" in (out / PICTURE).read_text()


def test_damaged_files_are_named_and_the_rest_is_shown(example: Path, tmp_path: Path) -> None:
    for file in example.rglob("*.jsonl"):
        (tmp_path / file.name.replace(".jsonl", f"-{file.parent.name}.jsonl")).write_bytes(
            file.read_bytes()[:-30]
        )
    ran = run("trace", str(tmp_path), "-o", str(tmp_path / "out"))
    assert ran.code == 0
    words = " ".join(ran.out.split())
    assert words.count(": cut off in the middle") + words.count("no JSON") >= 8
    assert "cut off in the middle" in (tmp_path / "out" / PAGE).read_text()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["nowhere"], "trace: DIR is 'nowhere'; expected a folder or a file that exists"),
        (["{empty}"], "files *.jsonl with traces"),
        (["{example}", "--request", "unheard of"], "--request is 'unheard of'"),
        (["{example}", "--slowest", "0"], "--slowest is '0'"),
        (["{example}", "-o", ""], "-o is ''; expected a file .html, .svg, .json, or a folder"),
        (
            ["{example}", "-o", "x.pdf"],
            "-o is 'x.pdf'; expected a file .html, .svg, .json, or a folder",
        ),
        (
            ["{example}", "-o", "{empty}/x.PNG"],
            "x.PNG'; expected a file .html, .svg, .json, or a folder",
        ),
        (["{example}", "-o", "/proc/version/out"], "-o is "),
        (["{example}", "-o", "/proc/version/out.svg"], "-o is "),
    ],
)
def test_an_error_is_reported_in_one_line(
    arguments: list[str], field: str, example: Path, tmp_path: Path
) -> None:
    assert field in refused(
        "trace", *(argument.format(example=example, empty=tmp_path) for argument in arguments)
    )


def test_a_very_long_recording_is_cut_to_what_a_viewer_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANDOVERS_OF_A_TRACE >= 1000
    monkeypatch.setattr("kvferry.cli.trace.command.HANDOVERS_OF_A_TRACE", 2)
    ran = run("trace", str(write_example(tmp_path / "in")), "-o", str(tmp_path / "a.json"))
    assert "the 2 slowest of 25 handovers are in the trace" in ran.out
    names = {
        event["name"] for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    }
    assert len([name for name in names if name.startswith("handover ")]) == 2


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
    routed = "chatcmpl-___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_1f0c99-5a2b"
    assert short_id(routed) == "1f0c99-5a2b"
    assert len(short_id("x" * 300)) <= 34
    assert short_id("cmpl-7-0") == "cmpl-7-0"
