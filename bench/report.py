"""docs/performance.md and its charts from the results that are in the repository.

    python -m bench.report               # writes docs/performance.md and docs/figures/*.svg
    python -m bench.report --into DIR    # elsewhere, to look at

It measures nothing: the benchmarks write bench/results/*.json, and this draws what they wrote, the same bytes every
time (tests/bench/test_performance_page.py). It refuses the file of a quick run, and a result whose commit is not a
clean one in the history of HEAD. Where git cannot say (a source distribution, a shallow clone), stderr has that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.charts import svg_of
from bench.machine import RESULTS
from bench.measured import NotPublishable, read_all, require_commits
from bench.performance_page import figure_name, page_of

DOCS = RESULTS.parent.parent / "docs"


def rendered(results: Path) -> dict[str, str]:
    """Every file of the report, by its path within the docs.

    Raises:
        NotPublishable: see `read_all`.
    """
    found = read_all(results)
    files = {"performance.md": page_of(found)}
    for one in found:
        for number, chart in enumerate(one.results.charts, 1):
            files[f"figures/{figure_name(one.name, number)}"] = svg_of(chart)
    return files


def write_report(results: Path, docs: Path) -> list[Path]:
    """Write them, and remove charts that are no longer drawn; returns what was written."""
    files = rendered(results)
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    for old in (docs / "figures").glob("*.svg"):
        if f"figures/{old.name}" not in files:
            old.unlink()
    for name, text in files.items():
        (docs / name).write_text(text)
    return [docs / name for name in files]


def main() -> int:
    """Returns 1 if a file cannot be published."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the JSON files")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder of performance.md and figures/")
    chosen = parser.parse_args()
    try:
        not_checked = require_commits(read_all(chosen.results))
        written = write_report(chosen.results, chosen.into)
    except NotPublishable as refused:
        print(refused, file=sys.stderr)
        return 1
    if not_checked:
        print(not_checked, file=sys.stderr)
    print(f"{written[0]} and {len(written) - 1} charts")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
