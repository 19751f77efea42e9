"""The command `kvferry`: arguments, exit codes, and the one line that says what is wrong.

Exit codes: 0 when the pair works or the engine answered; 2 when the pair is refused, when nobody answered, and for
anything wrong with the input. A refused pair is told on standard output, everything else in one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvferry.protocol.errors import KvferryError

GOOD = 0
BAD = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KvferryError as wrong:
        print(f"kvferry {options.command}: {wrong}", file=sys.stderr)
        return BAD
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Who reads what from whom when KV caches move between engines.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_describe(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="how one engine would read another's cache",
        description="How CONSUMER would read PRODUCER's cache. Either is a dump of an engine (a file, - for standard "
        "input) or a short form, e.g. layers=32,heads=8,dim=128,tp=4. Exit code 2: the pair is refused, or bad input.",
        allow_abbrev=False,
    )
    plan.add_argument("producer", metavar="PRODUCER", help="the engine that prefills")
    plan.add_argument("consumer", metavar="CONSUMER", help="the engine that decodes")
    plan.add_argument("--tokens", metavar="N", help="length of the prompt (default: 8192, or what the caches hold)")
    plan.add_argument("--link", metavar="G", default="50", help="GB/s of every worker's link (default: %(default)s)")
    plan.add_argument("--direct-min-bytes", metavar="N", help="the consumer's direct_min_bytes (default: 16384)")
    plan.add_argument("--staging-pool-bytes", metavar="N", help="the consumer's staging_pool_bytes, 0 for none")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--svg", metavar="FILE", help="also draw the plan")
    plan.add_argument("--copies", metavar="REQUEST", help="print every copy for the blocks in this JSON file")
    plan.add_argument("--out", metavar="FILE", help="where --copies goes (default: standard output, and no table)")
    plan.set_defaults(run=_run_plan)


def _add_describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    describe = commands.add_parser(
        "describe",
        help="ask a running engine for its description",
        description="Ask the engine whose side channel is at HOST:PORT for its description.",
        allow_abbrev=False,
    )
    describe.add_argument("address", metavar="HOST:PORT", help="the producer's side channel, [host]:port for IPv6")
    describe.add_argument("--json", action="store_true", help="print the dump that `kvferry plan` reads")
    describe.add_argument("--timeout", metavar="S", default="5", help="seconds to wait (default: %(default)s)")
    describe.set_defaults(run=_run_describe)


def _run_plan(options: argparse.Namespace) -> int:
    from kvferry.cli.plan_command import run_plan

    return run_plan(options)


def _run_describe(options: argparse.Namespace) -> int:
    from kvferry.cli.describe_command import run_describe

    return run_describe(options)


class _Version(argparse.Action):
    """Prints the version; it is looked up only then, since that takes a while."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("kvferry")
        except PackageNotFoundError:
            found = "(not installed)"
        print(f"kvferry {found}")
        parser.exit(GOOD)
