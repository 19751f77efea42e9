"""The accuracy test's command line. Heavy imports come after the settings are known to be good."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.accuracy.settings import (
    BadSetting,
    Settings,
    help_text,
    notes,
    read_settings,
)
from scripts.console import STOPPED, Progress, raise_when_stopped, shown

_ABOUT = """\
Starts a baseline engine, prefill and decode engines with kvferry and vllm-router, asks the same greedy prompts of
both, and shows in a table whether tokens, log-probabilities, bytes and counters are what they must be.
Exit status: 0 all is well, 1 a check failed, 2 a setting is wrong, 3 a server failed, 130 stopped.
"""
_FLAGS = {
    "--kv_buffer_device": "KV_BUFFER_DEVICE",
    "--attention-backend": "ATTENTION_BACKEND",
}
"""Flags of vLLM's own script of this name, and the variables that they set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("KVFERRY_COMMAND", "python -m scripts.accuracy"),
        description=_ABOUT,
        epilog=f"Environment variables, with their defaults:\n\n{help_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings and print the device, then stop",
    )
    for name, variable in _FLAGS.items():
        about = f"overrides the variable {variable}"
        parser.add_argument(
            name, dest=variable, metavar=variable, default="", help=about
        )
    parser.add_argument(
        "--enable-cross-layers",
        dest="CROSS_LAYERS",
        action="store_const",
        const="1",
        default="",
        help="the same as the variable CROSS_LAYERS",
    )
    chosen = vars(parser.parse_args(arguments))
    given = (*_FLAGS.values(), "CROSS_LAYERS")
    try:
        settings = read_settings(
            {**os.environ, **{name: chosen[name] for name in given if chosen[name]}}
        )
        if chosen["check"]:
            print(settings.device)
            return 0
        return _run(settings)
    except BadSetting as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return 130


def _run(settings: Settings) -> int:
    import asyncio

    from scripts.accuracy.model import NoModel
    from scripts.accuracy.processes import ServerFailed
    from scripts.accuracy.report import save, show, verdict
    from scripts.accuracy.run import Run

    raise_when_stopped()
    progress = Progress()
    log_dir = settings.log_dir / time.strftime("%Y%m%d-%H%M%S")
    reports = []
    print(f"logs: {shown(log_dir)}", flush=True)
    for note in notes(settings, os.environ):
        progress.say(note)
    for name in settings.models:
        try:
            with ExitStack() as stack:
                run = Run(settings, name, log_dir / Path(name).name, stack)
                reports.append(asyncio.run(run.go()))
        except (ServerFailed, NoModel) as error:
            print(f"\n{error}\nFAILED; logs: {shown(log_dir)}", file=sys.stderr)
            return 3
        save(reports, log_dir / "report.json")
        show(reports[-1])
    status = verdict(reports)
    for report in reports:
        for skipped in report.skipped:
            print(f"NOT RUN: {skipped}")
    word = "passed" if status == 0 else "FAILED"
    print(f"{word} in {progress.elapsed_s:.0f} s; logs: {shown(log_dir)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
