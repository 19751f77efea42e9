"""The main job in many configurations, and their table in docs/full-matrix.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.accuracy.settings import ROOT

PAGE = ROOT / "docs" / "full-matrix.md"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One line of the table: the variables of the accuracy test that differ from their defaults."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)


CONFIGURATIONS = (
    Configuration("float32"),
    Configuration("bfloat16", {"DTYPE": "bfloat16"}),
    Configuration("small-blocks", {"PREFILL_BLOCK_SIZE": "32", "DECODE_BLOCK_SIZE": "32"}),
    Configuration("failures-end-requests", {"KV_LOAD_FAILURE_POLICY": "fail"}),
    Configuration("two-prefill", {"NUM_PREFILL_INSTANCES": "2"}),
    Configuration("two-decode", {"NUM_DECODE_INSTANCES": "2"}),
    Configuration("tp2", {"MODEL_NAMES": "tiny-llama", "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"}),
    Configuration("crowd-of-16", {"CONCURRENCY": "16"}),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration's run ended with; `report` is empty when it got to no table."""

    configuration: Configuration
    status: int
    seconds: float
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> str:
        """A line of the table."""
        variables = " ".join(f"`{name}={value}`" for name, value in self.configuration.variables.items()) or "defaults"
        checks = self.report.get("checks", [])
        failed = [check["name"] for check in checks if check["passed"] is False]
        result = {0: "passed", 3: "a server failed"}.get(
            self.status, "**failed**: " + (", ".join(failed) or "no table")
        )
        found = next((check["detail"] for check in checks if "tokens" in check["name"]), "")
        handover = next((text for name, text in self.report.get("figures", {}).items() if "handover" in name), "")
        return f"| {self.configuration.name} | {variables} | {result} | {found} | {handover} | {self.seconds:.0f} s |"


def run(configuration: Configuration, log_dir: Path) -> Outcome:
    """One configuration in a process of its own, its output on this one's."""
    folder = log_dir / configuration.name
    environment = {**os.environ, **configuration.variables, "LOG_DIR": str(folder)}
    started_s = time.monotonic()
    print(f"\n== {configuration.name} {dict(configuration.variables)}", flush=True)
    command = [sys.executable, "-m", "scripts.accuracy"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    reports = sorted(folder.glob("*/report.json"))
    report = json.loads(reports[-1].read_text())[-1] if reports else {}
    return Outcome(configuration, done.returncode, time.monotonic() - started_s, report)


def page(outcomes: Sequence[Outcome], commit: str) -> str:
    """The page as Markdown."""
    cores = os.cpu_count()
    lines = [
        "# The full matrix",
        "",
        "Written by `just full`: the main job in many configurations, with real engines.",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, {cores} cores, Python {platform.python_version()}",
        "",
        "| configuration | variables | result | tokens | handover | took |",
        "| --- | --- | --- | --- | --- | --- |",
        *(outcome.row for outcome in outcomes),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    wanted = list(sys.argv[1:] if arguments is None else arguments)
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    log_dir = ROOT / "logs" / time.strftime("full-%Y%m%d-%H%M%S")
    outcomes = []
    for name in wanted or known:
        outcome = run(known[name], log_dir)
        outcomes.append(outcome)
        if outcome.status == 130:
            return 130
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    text = page(outcomes, commit)
    print("\n" + text)
    if not wanted:
        PAGE.write_text(text)
        print(f"written: {PAGE.relative_to(ROOT)}")
    return max(outcome.status for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
