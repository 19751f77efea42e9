"""The demonstration's command line. Heavy imports come after the settings are known to be good."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from scripts.accuracy.settings import BadSetting, Settings, read_settings
from scripts.console import STOPPED, raise_when_stopped

_ABOUT = """\
Starts two engines with kvferry, vllm-router and Prometheus, sends some load with one slow request in it, and shows the
dashboard's values and that request's timeline. Then everything stays up to be tried, until Ctrl-C.
Engines are chosen by the variables of scripts/run_accuracy_test.sh.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0 all is well, 1 something was not shown, 2 a setting is wrong, 3 a server failed."""
    parser = argparse.ArgumentParser(
        prog=os.environ.get("KVFERRY_COMMAND", "python -m scripts.demo"),
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--once", action="store_true", help="end when everything has been shown")
    parser.add_argument("--check", action="store_true", help="check the settings and print the device, then stop")
    chosen = parser.parse_args(arguments)
    try:
        settings = read_settings(os.environ)
    except BadSetting as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if chosen.check:
        print(settings.device)
        return 0
    raise_when_stopped()
    try:
        return _run(settings, once=chosen.once)
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return 0


def _run(settings: Settings, *, once: bool) -> int:
    import asyncio

    from scripts.accuracy.model import ConversionFailed
    from scripts.accuracy.processes import ServerFailed
    from scripts.demo.show import Demo

    try:
        with ExitStack() as stack:
            demo = Demo(settings, stack)
            status = asyncio.run(demo.go())
            if not once:
                demo.say_what_to_try()
                while True:
                    time.sleep(3600)
            return status
    except (ServerFailed, ConversionFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
