"""The command of a benchmark, `python -m bench.NAME`: measure, print, write. Every one has `--quick`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from bench.figures import Results, publish
from bench.provenance import begin


def command(name: str, about: str | None, quick: str) -> argparse.ArgumentParser:
    """The parser of a benchmark; options of its own are added to it.

    Args:
        about: the docstring of its module.
        quick: what `--quick` leaves out.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name.replace('-', '_')}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def measure_and_publish(name: str, measure: Callable[[], Results]) -> int:
    """Measure, print, write `results/NAME.json`.

    Returns:
        The exit status: 130 if it was stopped, by SIGTERM too; nothing is written then.
    """
    started = begin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = measure()
    except KeyboardInterrupt:
        print("stopped; all that was started has ended", file=sys.stderr)
        return 130
    publish(name, results, started)
    return 0


def quick_or_whole(
    name: str, about: str | None, quick: str, measure: Callable[[bool], Results]
) -> int:
    """The whole command of a benchmark without options of its own. `measure` gets True for a quick run."""
    chosen = command(name, about, quick).parse_args()
    return measure_and_publish(name, lambda: measure(chosen.quick))
