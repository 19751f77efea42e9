"""The command `kvferry`: arguments, exit codes, and error messages of one line.

Exit codes: 0 when the pair works, the engine answered or nothing is broken; 1 when the pair is refused, no engine
answers, the doctor found something broken or the benchmark a wrong byte; 2 when the input is invalid, or the benchmark
could not be made; 130 after Ctrl-C. A refused pair and the doctor's findings are printed on standard output, every
other error in one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvferry.protocol.errors import InputError, KvferryError
from kvferry.protocol.visible import escape_logs, visible
from kvferry.version import __version__

_ANY_HOST = "0.0.0.0"  # noqa: S104 - `bench --listen` is for other machines, and serves nothing but its own content
GOOD = 0
NO_ANSWER = 1
BAD = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Without abbreviations of options, and with errors of one line."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        # Here and not at the end, so that the error has the name of the command.
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        text = visible(f"{self.prog}: {message}")
        self.exit(BAD, f"{text}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # None: it was closed before the start.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
    escape_logs()
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = _run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvferryError as wrong:
        print(visible(f"kvferry {options.command}: {wrong}"), file=sys.stderr)
        if options.command == "describe" and not isinstance(wrong, InputError):
            return NO_ANSWER
        return BAD
    except OSError as refused:
        # It is that of standard output; other files have errors of their own. What Python has yet to write there goes
        # nowhere, or it would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(refused, BrokenPipeError):
            return GOOD
        print(visible(f"kvferry {options.command}: the system refused: {refused}"), file=sys.stderr)
        return BAD
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvferry",
        description="Plans, checks, measures and traces transfers of KV caches between engines.",
    )
    parser.add_argument(
        "--version", action="version", version=f"kvferry {__version__}", help="print the version"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_describe(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_trace(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="how one engine would read another's cache",
        description="How CONSUMER would read PRODUCER's cache. Either is a model with the engine's sizes: "
        "./config.json,tp=4, or a folder or a model of the local hub cache in its place. tp=2 alone has the model of "
        "the other side. It can also be a short form (layers=32,heads=8,dim=128,tp=4), or an engine's description JSON "
        "(a file, - for standard input). Exit code 1: the pair is refused.",
    )
    plan.add_argument("producer", metavar="PRODUCER", help="the engine that prefills")
    plan.add_argument("consumer", metavar="CONSUMER", help="the engine that decodes")
    plan.add_argument(
        "--tokens",
        metavar="N",
        help="length of the prompt (default: 8192, or what the caches hold)",
    )
    plan.add_argument(
        "--link",
        metavar="G",
        default="50",
        help="GB/s of every worker's link (default: %(default)s)",
    )
    plan.add_argument(
        "--direct-min-bytes", metavar="N", help="the consumer's direct_min_bytes (default: 16384)"
    )
    plan.add_argument(
        "--staging-pool-bytes", metavar="N", help="the consumer's staging_pool_bytes, 0 for none"
    )
    plan.add_argument(
        "--same-host",
        action="store_true",
        help="all of the producer's memory is mapped: both are on one host, with caches in shared files",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--svg", metavar="FILE", help="also draw the plan")
    plan.add_argument(
        "--copies", metavar="REQUEST", help="print every copy for the blocks in this JSON file"
    )
    plan.add_argument(
        "--out", metavar="FILE", help="where --copies goes (default: standard output, and no table)"
    )


def _add_describe(commands: argparse._SubParsersAction[_Parser]) -> None:
    describe = commands.add_parser(
        "describe",
        help="ask a running engine for its description",
        description="Ask the engine whose side channel is at HOST:PORT for its description.",
    )
    describe.add_argument(
        "address", metavar="HOST:PORT", help="the producer's side channel, [host]:port for IPv6"
    )
    describe.add_argument(
        "--json", action="store_true", help="print the description JSON that `kvferry plan` reads"
    )
    describe.add_argument(
        "--timeout", metavar="S", default="5", help="seconds to wait (default: %(default)s)"
    )


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with this machine",
        description="Checks versions, devices, UCX settings, limits, ports and the secret of this machine, and makes a "
        "loopback transfer. Run it as an engine is run: same user, container and environment. "
        "Exit code 1: something is broken.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument(
        "--data-parallel-size",
        metavar="N",
        default="1",
        help="ranks whose ports are tried (default: %(default)s)",
    )
    doctor.add_argument(
        "--timeout",
        metavar="S",
        default="8",
        help="seconds for all checks together, which run at the same time (default: %(default)s)",
    )


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="what the fabric between two machines does",
        description="Reads memory of known content from one machine to another over NIXL, compares every byte and "
        "times the reads, before an engine is started. Run --listen on one machine and --connect on the other, as "
        "engines are run: same user, container and environment. Exit code 1: a byte was wrong.",
    )
    bench.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        nargs="?",
        const=_ANY_HOST,
        help="offer memory to one client (default: 0.0.0.0:5700)",
    )
    bench.add_argument(
        "--allowed-hosts",
        metavar="HOST,…",
        help="addresses and networks whose clients may join a listener without a secret, or * for any (default: this "
        "host's)",
    )
    bench.add_argument(
        "--connect", metavar="HOST[:PORT]", help="read from a listener, at port 5700 by default"
    )
    bench.add_argument(
        "--device", metavar="D", default="auto", help="auto, cpu or cuda (default: %(default)s)"
    )
    bench.add_argument(
        "--max-size",
        metavar="N",
        default="64M",
        help="largest read, up to 1G (default: %(default)s)",
    )
    bench.add_argument(
        "--seconds",
        metavar="S",
        default="0.5",
        help="for each row of the table (default: %(default)s)",
    )
    bench.add_argument(
        "--timeout",
        metavar="S",
        default="10",
        help="for a read, or an answer (default: %(default)s)",
    )
    bench.add_argument("--json", action="store_true", help="print what was measured as JSON")


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="where the time of handovers went",
        description="Merges what engines with `trace_dir` recorded to one timeline per handover, the slowest first.",
    )
    trace.add_argument(
        "dirs", metavar="DIR", nargs="+", help="folders, searched to the bottom, or files *.jsonl"
    )
    trace.add_argument(
        "-o", dest="out", metavar="OUT", help="a folder to make, or one file: .html, .svg or .json"
    )
    trace.add_argument(
        "--request", metavar="ID", help="only handovers with an id (of any kind) that contains this"
    )
    trace.add_argument(
        "--slowest",
        metavar="N",
        default="20",
        help="handovers that are shown (default: %(default)s)",
    )
    trace.add_argument("--json", action="store_true", help="print what was found as JSON")


def _run(options: argparse.Namespace) -> int:
    """Run the command."""
    # Only its own modules are imported: `kvferry plan` must start in a fraction of a second, and the doctor where
    # packages are missing.
    if options.command == "plan":
        from kvferry.cli.plan.command import run_plan as run
    elif options.command == "describe":
        from kvferry.cli.plan.describe import run_describe as run
    elif options.command == "doctor":
        from kvferry.cli.doctor.command import run_doctor as run
    elif options.command == "bench":
        from kvferry.cli.bench.command import run_bench as run
    else:
        from kvferry.cli.trace.command import run_trace as run
    return run(options)
