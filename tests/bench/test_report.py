"""docs/performance.md is what the results say, and docs/missed-targets.md explains what was missed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench.figures import RESULTS
from bench.report import COMMANDS, DOCS, NotPublishable, main, read_all, rendered, require_commits, write_report

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


def test_every_target_is_on_the_page_and_the_missed_ones_come_first(tmp_path: Path) -> None:
    sample(tmp_path)
    page = rendered(tmp_path)["performance.md"]
    assert "1 of 2 targets are met" in page
    missed = page.index("| **missed** | [step](#step): growth | 1.23 × | at most 1.1 × | tried: a heap |")
    assert missed < page.index("| met | [step](#step): p99 | 31.05 µs | at most 200 µs |  |")
    assert "at commit `0123456789ab` on P, 2 cores, 25 GB, Linux x86_64" in page
    assert "| 10,000 | 1,235 |" in page


def test_benchmarks_without_a_result_are_named_with_their_commands(tmp_path: Path) -> None:
    sample(tmp_path)
    without = rendered(tmp_path)["performance.md"].partition("## step")[0]
    assert {command for command in COMMANDS.values() if f"`{command}`" not in without} == {"python -m bench.step"}


def test_charts_are_well_formed_and_one_that_is_no_longer_drawn_is_removed(tmp_path: Path) -> None:
    sample(tmp_path)
    write_report(tmp_path, tmp_path / "docs")
    drawn = {path.name: ElementTree.fromstring(path.read_text()) for path in (tmp_path / "docs/figures").iterdir()}  # noqa: S314
    words = {name: set(filter(None, (part.strip() for part in root.itertext()))) for name, root in drawn.items()}
    assert words["step-1.svg"] >= {"Growth & <more>", "leases", "µs", "1", "10,000", "p99", "limit"}
    assert words["step-2.svg"] >= {"bytes of a run", "4 KiB", "1 MiB"}
    sample(tmp_path, charts=[])
    write_report(tmp_path, tmp_path / "docs")
    assert list((tmp_path / "docs/figures").iterdir()) == []


def test_a_chart_of_which_nothing_was_measured_is_left_out(tmp_path: Path) -> None:
    series = [{"name": "p99", "x": [1], "y": [None]}]
    axes = {"title": "Nothing", "x_label": "x", "y_label": "y"}
    sample(tmp_path, charts=[{**axes, "series": []}, {**axes, "series": series}])
    assert list(rendered(tmp_path)) == ["performance.md"]


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


def test_a_file_of_no_benchmark_is_refused(tmp_path: Path) -> None:
    sample(tmp_path)
    (tmp_path / "step.json").rename(tmp_path / "other.json")
    with pytest.raises(NotPublishable, match=r"other\.json .*none of serve, "):
        read_all(tmp_path)


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


PUBLISHED = "## Steps\n\nMeasured in [step](performance.md#step).\n\n"
UNPUBLISHED = "## Steps\n\nNo run of step is published.\n\n"


@pytest.mark.parametrize(
    ("page", "is_published", "problem"),
    [
        (PUBLISHED + "- `growth`\n", True, None),
        (PUBLISHED, True, "'growth' was missed"),
        (PUBLISHED + "- `growth`\n- `p99`\n", True, "'p99' is explained"),
        (UNPUBLISHED + "- `growth`\n", True, "there is a published run"),
        (PUBLISHED + "- `growth`\n", False, "there is no published run"),
        (UNPUBLISHED + "- `growth`\n", False, None),
        ("## Steps\n\n- `growth`\n", True, "does not name its benchmark"),
    ],
)
def test_a_page_that_is_not_about_the_results_is_found(
    page: str, is_published: bool, problem: str | None, tmp_path: Path
) -> None:
    if is_published:
        sample(tmp_path)
    found = "; ".join(missed_targets_problems(page, tmp_path))
    assert (found == "") == (problem is None)
    assert (problem or "") in found


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
