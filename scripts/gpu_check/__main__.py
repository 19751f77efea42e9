"""The GPU check's command line. Heavy imports come after the options are known to be good."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.accuracy.devices import count_gpus
from scripts.accuracy.settings import VARIABLES, BadSetting
from scripts.console import STOPPED, Progress, raise_when_stopped, shown
from scripts.gpu_check.machine import Gpu, find_gpus
from scripts.gpu_check.parts import Planned, parts_for, plan

_ABOUT = """\
Runs everything that a node with GPUs can show of kvferry (docs/gpu-check.md), and writes report.json and report.md.
KVFERRY_DEVICE=cpu puts the CPU in the GPUs' place; CUDA_VISIBLE_DEVICES and LOG_DIR are heeded.
Exit status: 0 all is well, 1 something is wrong, 2 an option is wrong, 130 stopped.
"""
_SAID_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("KVFERRY_COMMAND", "python -m scripts.gpu_check"),
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of an hour: fewer parts, smaller amounts")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="parts that begin so; repeat it")
    parser.add_argument("--model", action="append", default=[], help="another model for the accuracy test; repeat it")
    parser.add_argument("--list", action="store_true", help="say what would run here, and what not and why; then stop")
    parser.add_argument("--check", action="store_true", help="check the options and print the device, then stop")
    chosen = parser.parse_args(arguments)
    try:
        device, log_dir = (VARIABLES[name].read(os.environ) for name in ("device", "log_dir"))
    except BadSetting as error:
        parser.error(str(error))
    if device != "cpu" and not count_gpus(os.environ):
        parser.error("no GPU was found by nvidia-smi; KVFERRY_DEVICE=cpu puts the CPU in its place")
    device = "cuda" if device == "auto" else device
    gpus = find_gpus(device, os.environ)
    parts = parts_for(device, quick=chosen.quick, models=chosen.model)
    planned = plan(parts, gpus, quick=chosen.quick, only=chosen.only)
    if not planned:
        parser.error(f"--only {' '.join(chosen.only)}: there are {'; '.join(part.name for part in parts)}")
    if chosen.list:
        for one in planned:
            print(f"{one.part.name:<42} {one.skipped or one.part.shows}")
        return 0
    if chosen.check:
        print(device)
        return 0
    return _run(planned, gpus, device, log_dir, quick=chosen.quick)


def _run(planned: Sequence[Planned], gpus: Sequence[Gpu], device: str, log_dir: Path, *, quick: bool) -> int:
    from rich.console import Console
    from rich.markup import escape

    from scripts.gpu_check.judging import Mark, Verdict
    from scripts.gpu_check.report import markdown, report_of, show, verdict
    from scripts.gpu_check.running import Done, adopt_orphans, run_part

    raise_when_stopped()
    adopt_orphans()
    progress, console = Progress(), Console(width=None if sys.stdout.isatty() else 150)
    folder = log_dir / "gpu-check" / time.strftime("%Y%m%d-%H%M%S")
    done: list[Done] = []
    stopped = False
    for number, one in enumerate(planned, 1):
        if one.skipped or stopped:
            done.append(Done(one, Verdict(Mark.SKIPPED, one.skipped or "stopped before it")))
            continue
        name = f"{number}/{len(planned)} {one.part.name}"
        progress.say(name)
        said_s = 0.0

        def on_progress(elapsed_s: float, last_line: str, name: str = name) -> None:
            nonlocal said_s
            line = f"{name}, for {elapsed_s:.0f} s: {last_line[:90]}"
            status.update(escape(line))  # shown on a terminal only
            if not console.is_terminal and elapsed_s - said_s >= _SAID_S:
                said_s = elapsed_s
                progress.say(f"  {line}")

        try:
            with console.status(escape(name)) as status:
                done.append(run_part(one, device, folder / f"{number:02}", on_progress))
        except KeyboardInterrupt:
            stopped = True
            done.append(Done(one, Verdict(Mark.SKIPPED, "stopped while it ran")))
            continue
        progress.say(f"  {done[-1].verdict.mark.value}: {done[-1].verdict.found}")
    report = report_of(done, gpus, device, quick=quick)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    (folder / "report.md").write_text(markdown(report))
    show(report, console)
    word = "passed" if report["passed"] else "FAILED"
    print(f"{word} in {progress.elapsed_s:.0f} s; the report to attach to an issue: {shown(folder)}/report.md, .json")
    if stopped:
        print(STOPPED, file=sys.stderr)
        return 130
    return verdict(done)


if __name__ == "__main__":
    sys.exit(main())
