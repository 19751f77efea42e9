"""The GPU check's command line and report. Heavy imports come after the options are known to be good."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import markdown
from scripts.accuracy.devices import visible_gpus
from scripts.accuracy.settings import ROOT, VARIABLES, BadSetting
from scripts.console import STOPPED, Progress, raise_when_stopped, show_results, shown
from scripts.gpu_check.gpus import Gpu, find_gpus
from scripts.gpu_check.parts import Planned, parts_for, plan

if TYPE_CHECKING:
    from scripts.gpu_check.running import Done

_ABOUT = """\
Runs everything that a node with GPUs can show of kvferry (docs/gpu-check.md), and writes report.json and report.md.
KVFERRY_DEVICE=cpu puts the CPU in the GPUs' place; CUDA_VISIBLE_DEVICES and LOG_DIR are heeded.
Exit status: 0 all is well, 1 something is wrong, 2 an option is wrong, 130 stopped.
"""
_SAID_S = 30.0
_SHORTEST_S = 10.0
"""With less time left of a limit no part begins."""
_SCHEMA = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("KVFERRY_COMMAND", "python -m scripts.gpu_check"),
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a quarter of an hour: fewer parts, smaller amounts",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PART",
        help="parts that begin so; repeat it",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="another model for the accuracy test; repeat it",
    )
    parser.add_argument(
        "--random-models",
        action="store_true",
        help="the accuracy test with random weights in the default model's place",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="SECONDS",
        help="end after this time: what runs then is FAILED, what has not begun is skipped",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="say what would run here, and what not and why; then stop",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the options and print the device, then stop",
    )
    chosen = parser.parse_args(arguments)
    if chosen.limit_s is not None and not chosen.limit_s > 0:
        parser.error(f"--limit-s {chosen.limit_s:g}: expected more than 0")
    try:
        device, log_dir = (
            VARIABLES[name].read(os.environ) for name in ("device", "log_dir")
        )
    except BadSetting as error:
        parser.error(str(error))
    if device != "cpu" and not visible_gpus(os.environ):
        parser.error(
            "no GPU was found by nvidia-smi; KVFERRY_DEVICE=cpu puts the CPU in its place"
        )
    device = "cuda" if device == "auto" else device
    gpus = find_gpus(device, os.environ)
    parts = parts_for(
        device,
        quick=chosen.quick,
        models=chosen.model,
        random_models=chosen.random_models,
    )
    planned = plan(parts, gpus, quick=chosen.quick, only=chosen.only)
    if not planned:
        parser.error(
            f"--only {' '.join(chosen.only)}: there are {'; '.join(part.name for part in parts)}"
        )
    if chosen.list:
        for one in planned:
            print(f"{one.part.name:<28} {one.skipped or one.part.command}")
        return 0
    if chosen.check:
        print(device)
        return 0
    folder = log_dir / "gpu-check" / time.strftime("%Y%m%d-%H%M%S")
    limit_s = math.inf if chosen.limit_s is None else chosen.limit_s
    return _run(planned, gpus, device, folder, quick=chosen.quick, limit_s=limit_s)


def _run(
    planned: Sequence[Planned],
    gpus: Sequence[Gpu],
    device: str,
    folder: Path,
    *,
    quick: bool,
    limit_s: float,
) -> int:
    from scripts.gpu_check.running import Done, adopt_orphans, run_part

    raise_when_stopped()
    adopt_orphans()
    progress = Progress()
    done: list[Done] = []
    stopped = False
    for number, one in enumerate(planned, 1):
        name = one.part.name
        if one.skipped or stopped:
            done.append(Done(name, "skipped", one.skipped or "stopped before it"))
            continue
        left_s = limit_s - progress.elapsed_s
        if left_s < _SHORTEST_S:
            done.append(Done(name, "skipped", f"no time left of {limit_s:g} s"))
            continue
        progress.say(f"{number}/{len(planned)} {name}")
        said_s = 0.0

        def on_progress(elapsed_s: float, last_line: str, name: str = name) -> None:
            nonlocal said_s
            if elapsed_s - said_s >= _SAID_S:
                said_s = elapsed_s
                progress.say(f"  {name}, for {elapsed_s:.0f} s: {last_line[:90]}")

        try:
            done.append(
                run_part(one, device, folder / f"{number:02}", on_progress, left_s)
            )
        except KeyboardInterrupt:
            stopped = True
            done.append(Done(name, "skipped", "stopped while it ran"))
            continue
        except Exception as error:  # noqa: BLE001 - shown; the parts after it go on
            done.append(
                Done(
                    name,
                    "FAILED",
                    f"the check itself failed: {error!r}",
                    command=one.part.command,
                )
            )
        progress.say(f"  {done[-1].mark}: {done[-1].found}")
        _write(report_of(done, gpus, device, quick=quick), folder)
    report = report_of(done, gpus, device, quick=quick)
    _write(report, folder)
    show_results(
        "GPU check",
        [(part["name"], part["mark"], part["found"]) for part in report["parts"]],
    )
    word = "passed" if report["passed"] else "FAILED"
    print(
        f"{word} in {progress.elapsed_s:.0f} s; the report to attach to an issue: {shown(folder)}/report.md, .json"
    )
    if stopped:
        print(STOPPED, file=sys.stderr)
        return 130
    return 0 if report["passed"] else 1


def _write(report: dict[str, Any], folder: Path) -> None:
    """Write it after every part: hours of a machine must not be lost with the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    )
    (folder / "report.md").write_text(markdown_of(report))


def report_of(
    done: Sequence[Done], gpus: Sequence[Gpu], device: str, *, quick: bool
) -> dict[str, Any]:
    """The whole report as plain values, without the names of this host and of its users' folders.

    It is passed when a part was run and none failed.
    """
    from bench.provenance import checkout, circumstances

    from scripts.gpu_check.pins import not_as_pinned

    marks = {one.mark for one in done}
    report = {
        "kvferry_gpu_check": _SCHEMA,
        "passed": bool(marks - {"skipped"}) and "FAILED" not in marks,
        "device": device,
        "quick": quick,
        **circumstances(str(checkout())),
        "not_as_pinned": not_as_pinned("vllm"),
        "gpus": {gpu.name: gpu.about for gpu in gpus},
        "parts": [asdict(one) for one in done],
    }
    text = json.dumps(report, ensure_ascii=False)
    for path, instead in ((ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(path), instead) if len(path.parts) > 1 else text
    begin = r"(?:\b|(?<=\\[nrt]))"  # within JSON a line before it ends in a letter
    anonymous: dict[str, Any] = json.loads(
        re.sub(rf"{begin}{re.escape(socket.gethostname())}\b", "HOST", text)
    )
    return anonymous


def markdown_of(report: dict[str, Any]) -> str:
    """The table for an issue, with the machine before it, and after it the commands, and the logs of what failed."""
    machine = report["machine"]
    rows = [
        (
            part["name"],
            part["mark"],
            part["found"],
            "; ".join(part["memory"]),
            f"{part['seconds']:.0f}",
        )
        for part in report["parts"]
    ]
    lines = [
        f"# GPU check of kvferry: {'passed' if report['passed'] else 'FAILED'}{', quick form' * report['quick']}",
        "",
        f"{report['date']}, commit {report['commit']}",
        "",
        f"- {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}",
        *(
            f"- {name}: {about}"
            for name, about in report["gpus"].items()
            if report["device"] == "cuda"
        ),
        f"- {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        *(f"- not as vLLM pins it: {line}" for line in report["not_as_pinned"]),
        "",
        markdown.table(
            "part | result | found | MiB in use before, most, after | s", rows
        ),
    ]
    for part in report["parts"]:
        if part["mark"] != "skipped":
            lines += ["", f"{part['name']}: `{part['command']}`"]
        if part["mark"] == "FAILED":
            lines += ["", "```text", part["log"].replace("```", "'''"), "```"]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
