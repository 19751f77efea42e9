"""What a figure depends on besides the code: the machine, the versions, the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("kvferry", "numpy", "msgspec", "nixl")


def circumstances() -> dict[str, Any]:
    """Machine, versions and commit as plain values."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": sys.version.split()[0], **versions},
    }


def write_results(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/NAME.json` with the circumstances in front."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(_rounded({**circumstances(), **figures}), indent=2, ensure_ascii=False) + "\n")
    return path


def _rounded(value: Any) -> Any:
    """Floats with four significant digits: a machine does not repeat more."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "plan", "protocol", "bench")
    return f"{commit}{' and changes' if changed else ''}" if commit else "unknown"
