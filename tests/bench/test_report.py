"""docs/performance.md is what the results say, and docs/missed-targets.md explains what was missed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.charts import DARK, svg_of
from bench.figures import RESULTS, Chart, Series
from bench.report import DOCS, main, read_all, require_commits, write_report

_SECTION = re.compile(
    r"^## .+\n\n(?:Measured in \[(?P<published>[\w-]+)\]|No run of (?P<unpublished>\w+) is published)",
    re.MULTILINE,
)
_EXPLAINED = re.compile(r"^- `(.+)`$", re.MULTILINE)


def test_the_page_and_every_chart_are_byte_for_byte_what_the_results_give(
    tmp_path: Path,
) -> None:
    write_report(RESULTS, tmp_path)
    expected = {
        path.relative_to(tmp_path): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    found = {
        path.relative_to(DOCS): path.read_bytes()
        for path in (DOCS / "figures").glob("*")
    }
    found[Path("performance.md")] = (DOCS / "performance.md").read_bytes()
    assert sorted(found) == sorted(expected), "python -m bench.report writes them"
    for name, content in expected.items():
        assert found[name] == content, (
            f"docs/{name} is not what bench/results says: python -m bench.report"
        )


def test_a_line_says_whose_it_is_by_its_colour_and_of_how_many_samples_it_is() -> None:
    ours, later = (
        Series.of_samples(f"kvferry, {how}", [(1, [2.0, 3.0]), (2, [4.0])])
        for how in ("early", "later")
    )
    peer, other = (
        Series("NixlConnector", (1, 2), (5.0, 6.0)),
        Series("a host each", (1, 2), (7.0, 8.0)),
    )
    colours = []
    for lines in ([ours, peer], [other, peer, later]):
        svg = svg_of(Chart("title", "x", "ms", lines))
        drawn = re.findall(
            r"fill: none; stroke: (#\w{6}); (?:stroke-width|stroke-dasharray)(?!: 0.8)",
            svg,
        )
        colours.append(list(dict.fromkeys(one for one in drawn if one not in DARK)))
        assert "(n = 3)</text>" in svg
    assert colours[0] == [colours[1][2], colours[1][1]]
    assert len({*colours[1]}) == 3


def test_every_result_is_of_a_clean_commit_of_this_repository() -> None:
    if not_checked := require_commits(read_all(RESULTS)):
        pytest.skip(f"git cannot check the commits of {', '.join(not_checked)} here")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"quick": True, "command": "python -m bench.step --quick"}, "without --quick"),
        ({"targets": None}, "is not what bench.figures.publish writes"),
        (
            {"commit": "36830c01adc8 and changes"},
            "of commit '36830c01adc8 and changes'",
        ),
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
    monkeypatch.setattr(
        "sys.argv",
        ["report", "--results", str(tmp_path), "--into", str(tmp_path / "docs")],
    )
    assert main() == 1
    said = capsys.readouterr().err
    assert "step.json" in said
    assert why in said
    assert not (tmp_path / "docs").exists()


def test_the_missed_targets_and_no_others_are_explained() -> None:
    missed = {
        one.name: Counter(
            target.name for target in one.results.targets if not target.met
        )
        for one in read_all(RESULTS)
    }
    page = (DOCS / "missed-targets.md").read_text()
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        head = _SECTION.match(part)
        assert head is not None, f"{part.splitlines()[0]!r} does not name its benchmark"
        name = head["published"] or head["unpublished"]
        assert (head["published"] is not None) == (name in missed), name
        if head["published"]:
            assert Counter(_EXPLAINED.findall(part)) == missed.pop(name), name
    assert not any(missed.values()), missed


def sample(folder: Path, **changed: Any) -> None:
    """A file as `bench.figures.publish` writes it, with `changed` keys."""
    given = {
        "date": "2026-11-22 03:00 UTC",
        "commit": "0123456789ab",
        "machine": {
            "processor": "P",
            "cores": 2,
            "memory_gb": 25,
            "load": 0.1,
            "system": "Linux x86_64",
        },
        "versions": {"python": "3.11.7"},
        "command": "python -m bench.step",
        "what": "A sample. Of nothing.",
        "tables": [],
        "charts": [],
        "targets": [],
        "notes": [],
        "quick": False,
    }
    (folder / "step.json").write_text(json.dumps({**given, **changed}))
