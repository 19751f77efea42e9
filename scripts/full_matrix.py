"""The main job in every configuration that this machine can run, and its dated table.

    python -m scripts.full_matrix                 # all of them; writes docs/full-matrix.md
    python -m scripts.full_matrix bfloat16        # those whose name contains the word; the others keep their rows

`just full` calls it after all tests. A row that failed is written too, and the exit status is 1.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from scripts.accuracy.settings import TINY_MODEL, TINY_MODELS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "full-matrix.md"

HEAD = """\
# Full matrix

Written by `just full`. Each row is one run of `scripts/run_accuracy_test.sh` with the variables named, on the machine
and the commit of its date.

| configuration | variables | result | prompts · tokens | bytes moved | handover | date | commit | machine |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run of the main job.

    Attributes:
        cores: it is not run on a machine with fewer.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    cores: int = 2


# Three workers on two cores wait for each other: with long timeouts a row fails for what it is about.
LONG_TIMEOUTS = {"KV_CONNECTOR_EXTRA_CONFIG": '{"kv_lease_duration": 120, "handshake_timeout_s": 60}'}

CONFIGURATIONS = (
    Configuration("float32, one to one"),
    Configuration("bfloat16, one to one", {"DTYPE": "bfloat16"}),
    Configuration("float32, blocks of 64", {"PREFILL_BLOCK_SIZE": "64", "DECODE_BLOCK_SIZE": "64"}),
    Configuration("float32, two prefill engines", {"NUM_PREFILL_INSTANCES": "2"}),
    Configuration("float32, two decode engines", {"NUM_DECODE_INSTANCES": "2"}),
    *(
        Configuration(
            f"float32, TP {prefill} to TP {decode}, {heads} KV heads",
            {"MODEL_NAMES": name, "PREFILLER_TP_SIZE": str(prefill), "DECODER_TP_SIZE": str(decode), **LONG_TIMEOUTS},
        )
        for name, heads in TINY_MODELS.items()
        for prefill, decode in ((1, 2), (2, 1))
    ),
    Configuration("float32, PP 2 to PP 1", {"MODEL_NAMES": TINY_MODEL, "PREFILLER_PP_SIZE": "2", **LONG_TIMEOUTS}),
    Configuration("float32, blocks of 32 to 64", {"PREFILL_BLOCK_SIZE": "32", "DECODE_BLOCK_SIZE": "64"}),
    Configuration("float32, blocks of 128 to 32", {"PREFILL_BLOCK_SIZE": "128", "DECODE_BLOCK_SIZE": "32"}),
    # Four workers on two cores: vLLM's collectives spin on the CPU, and a token takes up to tens of seconds.
    Configuration(
        "float32, TP 2 to TP 2",
        {"MODEL_NAMES": TINY_MODEL, "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"},
        cores=4,
    ),
    Configuration("float32, 16 at once", {"CONCURRENCY": "16"}),
    Configuration("float32, failures end requests", {"KV_LOAD_FAILURE_POLICY": "fail"}),
)


def run(configuration: Configuration) -> dict[str, str]:
    """Run one configuration; the cells of its row."""
    print(f"\n== {configuration.name}", flush=True)
    if (os.cpu_count() or 1) < configuration.cores:
        reported = f"not run: needs {configuration.cores} cores"
        return {"result": reported, "prompts": "–", "bytes": "–", "handover": "–"}
    logs = ROOT / "logs" / "full" / re.sub(r"\W+", "-", configuration.name)
    environment = {**os.environ, **configuration.variables, "LOG_DIR": str(logs)}
    status = subprocess.run(["scripts/run_accuracy_test.sh"], cwd=ROOT, env=environment, check=False).returncode
    written = sorted(logs.glob("*/report.json"))
    report = json.loads(written[-1].read_text())[0] if written and status in (0, 1) else {}
    found = {check["name"]: check["detail"] for check in report.get("checks", [])}
    figures = report.get("figures", {})
    return {
        "result": "ok" if status == 0 else f"FAILED (exit status {status})",
        "prompts": figures.get("prompts · tokens compared", "–"),
        "bytes": found.get("bytes moved, prompt by prompt", "–"),
        "handover": figures.get("handover: prefill answered → first token", "–"),
    }


def row(configuration: Configuration, cells: dict[str, str]) -> str:
    """One line of the table."""
    variables = " ".join(f"`{name}={value}`" for name, value in configuration.variables.items()) or "–"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    parts = [configuration.name, variables, *cells.values(), time.strftime("%Y-%m-%d"), commit, machine]
    return "| " + " | ".join(part.replace("|", "/") for part in parts) + " |"


def kept_rows() -> dict[str, str]:
    """The rows that the page has, by configuration."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}


def main(words: list[str]) -> int:
    """Run what is asked for and write the page after every row."""
    rows = kept_rows()
    failed = False
    for configuration in CONFIGURATIONS:
        if words and not any(word in configuration.name for word in words):
            continue
        cells = run(configuration)
        failed |= cells["result"].startswith("FAILED")
        rows[configuration.name] = row(configuration, cells)
        present = [rows[each.name] for each in CONFIGURATIONS if each.name in rows]
        PAGE.write_text(HEAD + "\n".join(present) + "\n")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
