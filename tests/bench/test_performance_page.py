"""The page about performance is what the results in the repository say, and so is every figure quoted elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench.machine import RESULTS
from bench.measured import COMMANDS, NotPublishable, read_all, require_commits
from bench.quoted import quotes_in
from bench.report import DOCS, main, rendered, write_report

ROOT = DOCS.parent
_MARK = re.compile(r"<!-- measured in [\w-]+: .+? -->")


def test_the_page_and_every_chart_are_byte_for_byte_what_the_results_give(tmp_path: Path) -> None:
    write_report(RESULTS, tmp_path)
    expected = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = {path.relative_to(DOCS): path.read_bytes() for path in (DOCS / "figures").glob("*")}
    found[Path("performance.md")] = (DOCS / "performance.md").read_bytes()
    assert sorted(found) == sorted(expected), "python -m bench.report writes them"
    for name, content in expected.items():
        assert found[name] == content, f"docs/{name} is not what bench/results says: python -m bench.report"


def test_every_result_is_of_a_clean_commit_of_this_repository() -> None:
    if not_checked := require_commits(read_all(RESULTS)):
        pytest.skip(not_checked)


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_every_figure_that_a_page_marks_as_measured_is_the_one_in_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    quotes = list(quotes_in(text))
    assert len(quotes) == len(_MARK.findall(text)), "a mark has no number before it"
    assert [problem for quote in quotes if (problem := quote.problem(read_all(RESULTS)))] == []


def test_every_target_is_on_the_page_and_the_missed_ones_come_first(tmp_path: Path) -> None:
    sample(tmp_path)
    page = rendered(tmp_path)["performance.md"]
    summary = page[: page.index("## sample")]
    assert "1 of 2 are met; 1 missed, listed first." in summary
    assert summary.index("| **missed** | growth | 1.23 × | at most 1.1 × |") < summary.index("| met | p99 | 31.05 µs |")
    assert "| **missed** | growth | 1.23 × | at most 1.1 × | tried: a heap |" in page[len(summary) :]


def test_the_same_results_give_the_same_bytes_and_charts_are_well_formed(tmp_path: Path) -> None:
    sample(tmp_path)
    files = rendered(tmp_path)
    assert files == rendered(tmp_path)
    drawn = {name: ElementTree.fromstring(text) for name, text in files.items() if name.endswith(".svg")}  # noqa: S314
    assert sorted(drawn) == ["figures/sample-1.svg", "figures/sample-2.svg"]
    words = {name: set(filter(None, (part.strip() for part in root.itertext()))) for name, root in drawn.items()}
    assert words["figures/sample-1.svg"] >= {"Growth & <more>", "leases", "µs", "1", "10,000", "p99", "limit"}
    assert words["figures/sample-2.svg"] >= {"HND", "NHD", "3.21"}


def test_a_chart_that_is_no_longer_drawn_is_removed(tmp_path: Path) -> None:
    sample(tmp_path)
    write_report(tmp_path, tmp_path / "docs")
    sample(tmp_path, charts=[])
    write_report(tmp_path, tmp_path / "docs")
    assert list((tmp_path / "docs/figures").iterdir()) == []


def test_charts_and_tables_of_which_nothing_was_measured_are_left_out(tmp_path: Path) -> None:
    empty = {"title": "Nothing", "x_label": "x", "y_label": "y", "x_log": False, "y_log": False}
    series = [{"name": "p99", "x": [1], "y": [None], "low": None, "high": None}]
    charts = [{**empty, "series": []}, {**empty, "series": series}]
    sample(tmp_path, charts=charts, tables=[{"title": "Nothing", "columns": ["a"], "rows": []}])
    files = rendered(tmp_path)
    assert list(files) == ["performance.md"]
    assert "Nothing" not in files["performance.md"]


def test_benchmarks_without_a_result_are_listed_with_their_commands_and_the_others_have_their_chapters(
    tmp_path: Path,
) -> None:
    sample(tmp_path)
    (tmp_path / "sample.json").rename(tmp_path / "soak.json")
    page = rendered(tmp_path)["performance.md"]
    missing = page[page.index("## No published run") :]
    assert "python -m bench.serve\n" in missing
    assert "bench.soak" not in missing
    assert "## soak" in page
    assert "no published run](#no-published-run) of serve, engine_contact, step," in page


def test_without_any_result_the_page_has_every_command(tmp_path: Path) -> None:
    page = rendered(tmp_path)["performance.md"]
    assert [command for command in COMMANDS.values() if f"\n{command}\n" not in page] == []
    assert "Machine" not in page


def test_every_benchmark_that_publishes_is_known_by_its_command() -> None:
    publishing = {path.stem for path in (ROOT / "bench").glob("*.py") if "started = begin()" in path.read_text()}
    assert {command.split()[2].removeprefix("bench.") for command in COMMANDS.values()} == publishing


def test_a_quick_run_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample(tmp_path, quick=True, command="python -m bench.sample --quick")
    with pytest.raises(NotPublishable, match="without --quick"):
        rendered(tmp_path)


def test_a_file_that_lacks_a_key_is_refused_by_name_and_one_of_the_older_shape_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "older.json").write_text(json.dumps({"date": "2026-11-21", "cases": []}))
    assert read_all(tmp_path) == []
    (tmp_path / "broken.json").write_text(json.dumps({"what": "x", "command": "y"}))
    monkeypatch.setattr("sys.argv", ["report", "--results", str(tmp_path), "--into", str(tmp_path / "docs")])
    assert main() == 1
    assert "broken.json is not what bench.figures.publish writes" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("31 µs<!-- measured in sample: p99 -->", None),
        ("**31.0** µs<!-- measured in sample: p99 -->", None),
        ("31.05 µs<!-- measured in sample: p99 -->", None),
        ("32 µs<!-- measured in sample: p99 -->", "has 31.05 for 'p99'"),
        ("1,235 MB<!-- measured in sample: Per step | 10,000 | memory, MB -->", None),
        ("1,234 MB<!-- measured in sample: Per step | 10,000 | memory, MB -->", "has 1,235"),
        ("12.0 ms<!-- measured in sample: Per step | 10,000 | range, ms -->", None),
        ("1 MB<!-- measured in sample: Per step | 20,000 | memory, MB -->", "no row '20,000'"),
        ("1 MB<!-- measured in sample: Per step | 10,000 | disk, MB -->", "has – for"),
        ("1 µs<!-- measured in sample: p98 -->", "no target 'p98'"),
        ("1 µs<!-- measured in other: p99 -->", "no other.json"),
    ],
)
def test_a_quoted_figure_must_be_the_measured_one_with_the_digits_it_has(
    text: str, problem: str | None, tmp_path: Path
) -> None:
    sample(tmp_path)
    (quote,) = quotes_in(text)
    found = quote.problem(read_all(tmp_path))
    assert (found is None) == (problem is None), found
    assert problem is None or problem in (found or "")


def sample(folder: Path, **changed: Any) -> None:
    """A file as `bench.figures.publish` writes it, with `changed` keys."""
    growth = {
        "title": "Growth & <more>",
        "x_label": "leases",
        "y_label": "µs",
        "x_log": True,
        "y_log": False,
        "series": [{"name": "p99", "x": [1, 10_000], "y": [31.0, 33.0], "low": [30.0, 31.0], "high": [32.0, 40.0]}],
        "limits": [{"name": "limit", "y": 200.0}],
    }
    bars = {
        "title": "Layouts",
        "x_label": "layout",
        "y_label": "GB/s",
        "x_log": False,
        "y_log": False,
        "series": [{"name": "relayout", "x": ["HND", "NHD"], "y": [3.21, None], "low": None, "high": None}],
    }
    p99 = {"name": "p99", "measured": 31.05, "limit": 200.0, "unit": "µs", "kind": "at most", "met": True, "note": ""}
    missed = {"name": "growth", "measured": 1.23, "limit": 1.1, "unit": "×", "met": False, "note": "tried: a heap"}
    given = {
        "date": "2026-11-22 03:00 UTC",
        "commit": "0123456789ab",
        "machine": {"processor": "P", "cores": 2, "memory_gb": 25, "load": 0.1, "system": "Linux x86_64"},
        "versions": {"python": "3.11.7"},
        "command": "python -m bench.sample",
        "what": "A sample. Of nothing.",
        "tables": [
            {
                "title": "Per step",
                "columns": ["leases", "memory, MB", "range, ms"],
                "rows": [[10_000, 1234.6, "12.0 (11 … 14)"]],
            }
        ],
        "charts": [growth, bars],
        "targets": [p99, {**missed, "kind": "at most"}],
        "notes": [],
        "raw": {},
        "quick": False,
    }
    (folder / "sample.json").write_text(json.dumps({**given, **changed}))
