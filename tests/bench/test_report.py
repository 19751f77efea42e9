"""docs/performance.md is what the results say, and docs/missed-targets.md explains what was missed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.figures import RESULTS
from bench.report import COMMANDS, DOCS, main, read_all, require_commits, write_report

_SECTION = re.compile(
    r"^## .+\n\n(?:Measured in \[(?P<published>\w+)\]|No run of (?P<unpublished>\w+) is published)", re.MULTILINE
)
_EXPLAINED = re.compile(r"^- `(.+)`$", re.MULTILINE)


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
        pytest.skip(f"git cannot check the commits of {', '.join(not_checked)} here")


def test_every_benchmark_that_publishes_is_known_by_its_command() -> None:
    folder = DOCS.parent / "bench"
    publishing = {path.stem for path in folder.glob("*.py") if "started = begin()" in path.read_text()}
    assert set(COMMANDS) == publishing
    assert {command.split()[2].removeprefix("bench.") for command in COMMANDS.values()} == publishing


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"quick": True, "command": "python -m bench.step --quick"}, "without --quick"),
        ({"targets": None}, "is not what bench.figures.publish writes"),
        ({"commit": "36830c01adc8 and changes"}, "of commit '36830c01adc8 and changes'"),
    ],
)
def test_what_cannot_be_published_is_refused_and_nothing_is_written(
    changed: dict[str, Any],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sample(tmp_path, **changed)
    monkeypatch.setattr("sys.argv", ["report", "--results", str(tmp_path), "--into", str(tmp_path / "docs")])
    assert main() == 1
    said = capsys.readouterr().err
    assert "step.json" in said
    assert why in said
    assert not (tmp_path / "docs").exists()


def missed_targets_problems(page: str, results: Path) -> list[str]:
    """In words, where the page is not about what was missed."""
    found: list[str] = []
    missed = {
        one.name: Counter(target.name for target in one.results.targets if not target.met) for one in read_all(results)
    }
    explained: dict[str, Counter[str]] = {}
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        head = _SECTION.match(part)
        if head is None:
            found.append(f"{part.splitlines()[0]!r} does not name its benchmark")
            continue
        name = head["published"] or head["unpublished"]
        if (head["published"] is not None) != (name in missed):
            found.append(f"{name}: there is {'a' if name in missed else 'no'} published run")
        explained[name] = Counter(_EXPLAINED.findall(part))
    for name, targets in missed.items():
        listed = explained.get(name, Counter())
        found += [f"{name}: {target!r} was missed and is not explained" for target in (targets - listed).elements()]
        found += [f"{name}: {target!r} is explained and was not missed" for target in (listed - targets).elements()]
    return found


def test_the_missed_targets_and_no_others_are_explained() -> None:
    assert missed_targets_problems((DOCS / "missed-targets.md").read_text(), RESULTS) == []


def sample(folder: Path, **changed: Any) -> None:
    """A file as `bench.figures.publish` writes it, with `changed` keys."""
    growth = {
        "title": "Growth & <more>",
        "x_label": "leases",
        "y_label": "µs",
        "x_log": True,
        "series": [{"name": "p99", "x": [1, 10_000], "y": [31.0, 33.0], "low": [30.0, 31.0], "high": [32.0, 40.0]}],
        "limit": 200.0,
    }
    runs = {
        "title": "Runs",
        "x_label": "bytes of a run",
        "x_log": True,
        "y_label": "GB/s",
        "series": [{"name": "relayout", "x": [4096, 1 << 20], "y": [3.21, 4.0]}],
    }
    p99 = {"name": "p99", "measured": 31.05, "limit": 200.0, "unit": "µs", "kind": "at most", "met": True, "note": ""}
    missed = {"name": "growth", "measured": 1.23, "limit": 1.1, "unit": "×", "met": False, "note": "tried: a heap"}
    given = {
        "date": "2026-11-22 03:00 UTC",
        "commit": "0123456789ab",
        "machine": {"processor": "P", "cores": 2, "memory_gb": 25, "load": 0.1, "system": "Linux x86_64"},
        "versions": {"python": "3.11.7"},
        "command": "python -m bench.step",
        "what": "A sample. Of nothing.",
        "tables": [{"title": "Per step", "columns": ["leases", "memory, MB"], "rows": [[10_000, 1234.6]]}],
        "charts": [growth, runs],
        "targets": [p99, {**missed, "kind": "at most"}],
        "notes": [],
        "quick": False,
    }
    (folder / "step.json").write_text(json.dumps({**given, **changed}))
