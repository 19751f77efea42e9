"""What a machine with a GPU would do with a bundle (scripts/gpu_bundle.sh), on the emulated one:

    .venv/bin/python -m tests.gpu_emulation.bundle DEST [options of DEST/run.sh]

The machine is a Python with torch, torchvision and Triton out of `.venv-gpu-emulation`, and of `.venv` those packages
that DEST was made without. DEST must be made for this Python (`--python`). LIMIT_S and KVFERRY_BUNDLE_HOME are heeded;
GPU_EMULATION_DEVICES is the number of GPUs (one).
Printed is what became of each part, and by which ways it launched something on the device.
Exit status: 0 if every part that ran came to a launch, else 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu_emulation import build

_TORCH = (
    "cuda",
    "functorch",
    "nvidia",
    "torch",
    "torchgen",
    "torchvision",
    "torchvision.libs",
    "triton",
)
_START = """\
import sys; sys.path.append({root!r})
import tests.gpu_emulation.emulation.start as start; start.note_launches()
"""
_SMI = """\
#!{python} -IS
import os, sys
columns = dict(
    name="an emulated H100", driver_version="580.0", compute_cap="9.0",
)
columns |= {{"memory.total": "81559", "memory.free": "81000", "memory.used": "559"}}
asked = sys.argv[1]
for index in range(int(os.environ.get("GPU_EMULATION_DEVICES") or 1)):
    columns |= dict(
        index=str(index), uuid=f"GPU-00000000-0000-0000-0000-{{index + 1:012}}",
    )
    if asked == "--list-gpus":
        print(f"GPU {{index}}: an emulated H100")
    elif asked.startswith("--query-gpu="):
        print(", ".join(columns[name] for name in asked.partition("=")[2].split(",")))
"""
_NO_STAND_IN = "no stand-in"
_NOT_THERE = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
"""Variables of this process: without bytecode every engine compiles ten thousand files before it starts."""


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    if not arguments or not (Path(arguments[0]) / "run.sh").is_file():
        print(__doc__, file=sys.stderr)
        return 2
    bundle = Path(arguments[0]).resolve()
    home = Path(
        os.environ.get("KVFERRY_BUNDLE_HOME")
        or tempfile.mkdtemp(prefix="kvferry-bundle-")
    )
    home.mkdir(parents=True, exist_ok=True)
    manifest = json.loads((bundle / "manifest.json").read_text())
    python = make_machine(home / "machine", manifest["present"])
    out = home / "out"
    shutil.rmtree(out, ignore_errors=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _NOT_THERE},
        "PYTHON": str(python),
        "PATH": f"{python.parent}:{os.defpath}",
        "KVFERRY_BUNDLE_HOME": str(home),
        "OUT": str(out),
    }
    unpacked_s = _unpacked(bundle, environment)
    subprocess.run(
        [str(bundle / "run.sh"), *arguments[1:]], env=environment, check=False
    )
    if not (out / "report.json").is_file():
        return 1
    report = json.loads((out / "report.json").read_text())
    print(f"unpacked in {unpacked_s:.0f} s; everything is in {home}")
    return show(report["parts"])


def _unpacked(bundle: Path, environment: dict[str, str]) -> float:
    began_s = time.monotonic()
    subprocess.run(
        [str(bundle / "run.sh"), "--unpack-only"], env=environment, check=True
    )
    return time.monotonic() - began_s


def make_machine(folder: Path, present: Sequence[str]) -> Path:
    """An environment with what a machine with a GPU has of its own. Returns its Python."""
    python = folder / "bin" / "python3"
    if python.exists():
        return python
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    emulated = build.ENVIRONMENT / sysconfig.get_path(
        "purelib", "venv", {"base": ""}
    ).lstrip("/")
    for source in emulated.iterdir():
        if source.name in _TORCH or source.name.startswith(
            ("torch-", "torchvision-", "triton-", "cuda_")
        ):
            (packages / source.name).symlink_to(source)
    for name in present:
        _link_package(name, packages)
    (packages / "gpu_emulation.pth").write_text(_START.format(root=str(build.ROOT)))
    smi = folder / "bin" / "nvidia-smi"
    smi.write_text(_SMI.format(python=sys.executable))
    smi.chmod(0o755)
    return python


def _link_package(name: str, packages: Path) -> None:
    """Show a package of this Python to the machine's, and no other."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # what the check needs is missed where it is needed
    tops = {Path(str(file)).parts[0] for file in found.files or ()}
    for top in tops - {"..", "__pycache__"}:
        target = packages / top
        if not target.exists():
            target.symlink_to(str(found.locate_file(top)))


def show(parts: Sequence[dict[str, Any]]) -> int:
    """A table of the parts, for the docs."""
    print("| part | result | launched by | s |")
    print("| --- | --- | --- | --- |")
    stopped_short = 0
    for part in parts:
        ways = {
            way
            for name, found in part["results"].items()
            if Path(name).name.startswith("launches-") and isinstance(found, list)
            for way in found
        }
        if _NO_STAND_IN in part["log"]:
            ways.add("a kernel of NVIDIA's")
        ran = part["mark"] != "skipped"
        stopped_short += ran and not ways and part["mark"] == "FAILED"
        shown = ", ".join(sorted(ways)) or "–"
        print(f"| {part['name']} | {part['mark']} | {shown} | {part['seconds']:.0f} |")
    return int(bool(stopped_short))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
