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
from collections.abc import Mapping

from scripts.accuracy.settings import ROOT, TINY_MODEL, TINY_MODELS

PAGE = ROOT / "docs" / "full-matrix.md"
HEAD = """\
# Full matrix

Written by `just full`. Each row is one run of `scripts/run_accuracy_test.sh` with the variables named, on the machine
and the commit of its date.

| configuration | variables | result | prompts · tokens | bytes moved | date | commit | machine |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
# Three workers on two cores wait for each other: with long timeouts a row fails for what it is about.
_PATIENT = {"KV_CONNECTOR_EXTRA_CONFIG": '{"kv_lease_duration": 120, "handshake_timeout_s": 60}'}
_UNEQUAL = {
    f"float32, TP {prefill} to TP {decode}, {heads} KV heads": {
        "MODEL_NAMES": name,
        "PREFILLER_TP_SIZE": str(prefill),
        "DECODER_TP_SIZE": str(decode),
        **_PATIENT,
    }
    for name, heads in TINY_MODELS.items()
    for prefill, decode in ((1, 2), (2, 1))
}
FOUR_CORES = "float32, TP 2 to TP 2"
"""Not run with fewer: vLLM's collectives spin on the CPU, and a token takes up to tens of seconds."""
CONFIGURATIONS: dict[str, Mapping[str, str]] = {
    "float32, one to one": {},
    "bfloat16, one to one": {"DTYPE": "bfloat16"},
    "float32, blocks of 64": {"PREFILL_BLOCK_SIZE": "64", "DECODE_BLOCK_SIZE": "64"},
    "float32, two prefill engines": {"NUM_PREFILL_INSTANCES": "2"},
    "float32, two decode engines": {"NUM_DECODE_INSTANCES": "2"},
    **_UNEQUAL,
    "float32, PP 2 to PP 1": {"MODEL_NAMES": TINY_MODEL, "PREFILLER_PP_SIZE": "2", **_PATIENT},
    "float32, blocks of 32 to 64": {"PREFILL_BLOCK_SIZE": "32", "DECODE_BLOCK_SIZE": "64"},
    "float32, blocks of 128 to 32": {"PREFILL_BLOCK_SIZE": "128", "DECODE_BLOCK_SIZE": "32"},
    FOUR_CORES: {"MODEL_NAMES": TINY_MODEL, "PREFILLER_TP_SIZE": "2", "DECODER_TP_SIZE": "2"},
    "float32, 16 at once": {"CONCURRENCY": "16"},
    "float32, failures end requests": {"KV_LOAD_FAILURE_POLICY": "fail"},
}


def run(name: str) -> tuple[str, ...]:
    """Run one configuration; the cells of its row from the result to the bytes."""
    print(f"\n== {name}", flush=True)
    if name == FOUR_CORES and (os.cpu_count() or 1) < 4:
        return "not run: needs 4 cores", "–", "–"
    logs = ROOT / "logs" / "full" / re.sub(r"\W+", "-", name)
    environment = {**os.environ, **CONFIGURATIONS[name], "LOG_DIR": str(logs)}
    status = subprocess.run(["scripts/run_accuracy_test.sh"], cwd=ROOT, env=environment, check=False).returncode
    written = sorted(logs.glob("*/report.json"))
    report = json.loads(written[-1].read_text())[0] if written and status in (0, 1) else {}
    found = {**report.get("figures", {}), **{check["name"]: check["detail"] for check in report.get("checks", ())}}
    names = ("prompts · tokens compared", "bytes moved")
    result = "ok" if status == 0 else f"FAILED (exit status {status})"
    return result, *(found.get(name, "–") for name in names)


def row(name: str, cells: tuple[str, ...]) -> str:
    """One line of the table."""
    variables = " ".join(f"`{each}={value}`" for each, value in CONFIGURATIONS[name].items()) or "–"
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    parts = [name, variables, *cells, time.strftime("%Y-%m-%d"), commit, machine]
    return "| " + " | ".join(part.replace("|", "/") for part in parts) + " |"


def main(words: list[str]) -> int:
    """Run what is asked for and write the page after every row."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    failed = False
    for name in CONFIGURATIONS:
        if not words or any(word in name for word in words):
            cells = run(name)
            failed |= cells[0].startswith("FAILED")
            rows[name] = row(name, cells)
            PAGE.write_text(HEAD + "".join(f"{rows[each]}\n" for each in CONFIGURATIONS if each in rows))
    print(f"written: {PAGE.relative_to(ROOT)}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
