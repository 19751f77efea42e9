"""The table and the file beside it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from scripts.accuracy.checks import Check
from scripts.accuracy.report import Report, save, show, verdict


def shown(report: Report) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    return out.getvalue()


def test_the_table_shows_every_check_and_figure_as_it_is() -> None:
    report = Report("model [x]", [Check("a", True, "fine [api]"), Check("b", None, "why not")], {"figure": "1 ms"})
    text = shown(report)
    for part in ("model [x]", "fine [api]", "ok", "NOT RUN", "why not", "figure", "1 ms"):
        assert part in text
    assert "FAILED" not in text


def test_one_failed_check_fails_the_run() -> None:
    good = Report("a", [Check("a", True, ""), Check("b", None, "")])
    bad = Report("b", [Check("a", True, ""), Check("b", False, "")])
    assert verdict([good]) == 0
    assert verdict([good, bad]) == 1
    assert "FAILED" in shown(bad)


def test_a_run_without_any_check_has_not_passed() -> None:
    assert verdict([]) == 1
    assert verdict([Report("a")]) == 1
    assert verdict([Report("a", [Check("a", None, "not tried")])]) == 1


def test_the_last_lines_name_every_check_that_was_not_tried_with_its_reason() -> None:
    report = Report("a", [Check("a", True, ""), Check("gsm8k", None, "lm-eval is not installed")])
    assert report.passed
    assert report.skipped == ["gsm8k (lm-eval is not installed)"]


def test_programs_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    save([Report("t", [Check("a", False, "d")], {"f": "1"})], path)
    assert json.loads(path.read_text()) == [
        {
            "title": "t",
            "checks": [{"name": "a", "passed": False, "detail": "d"}],
            "figures": {"f": "1"},
            "passed": False,
        }
    ]
