"""gsm8k through `lm-eval`, where it and its questions are at hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.accuracy.settings import Settings

_PROBE = "import datasets; datasets.load_dataset('openai/gsm8k', 'main', split='test[:1]')"


class Gsm8kFailed(Exception):
    """lm-eval failed; the text names its log."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether gsm8k can be asked; `reason` says why not."""

    can_run: bool
    reason: str


def availability(settings: Settings) -> Availability:
    """Look whether lm-eval is installed and its questions can be loaded, from a hub or a local copy."""
    if settings.gsm8k == "off":
        return Availability(False, "GSM8K=off")
    if importlib.util.find_spec("lm_eval") is None:
        return Availability(False, "lm-eval is not installed (.venv/bin/pip install 'lm-eval[api]')")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return Availability(False, "loading its questions took more than 120 s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Availability(False, f"its questions cannot be loaded: {last[:160]}")
    return Availability(True, "")


def score(base_url: str, served_name: str, model: str, settings: Settings, log_dir: Path, name: str) -> float:
    """The share of right answers by strict match, at the run's concurrency.

    Raises:
        Gsm8kFailed: lm-eval failed; the text names its log.
    """
    folder = log_dir / f"gsm8k-{name}"
    arguments = {
        "model": served_name,
        "base_url": f"{base_url}/v1/completions",
        "num_concurrent": settings.concurrency,
        "tokenizer": model,
        "tokenized_requests": False,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "gsm8k"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--limit", str(settings.gsm8k_limit), "--output_path", str(folder)]
    log_path = log_dir / f"gsm8k-{name}.log"
    with log_path.open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=os.environ.copy())
    results = sorted(folder.rglob("results*.json"))
    if done.returncode or not results:
        raise Gsm8kFailed(f"lm-eval failed with exit status {done.returncode}: {log_path}")
    found = json.loads(results[-1].read_text())["results"]["gsm8k"]
    return float(found["exact_match,strict-match"])
