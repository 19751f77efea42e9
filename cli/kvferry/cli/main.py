"""The command `kvferry`: arguments, exit codes, and error messages of one line.

Exit codes: 0 when the pair works, the engine answered or nothing is broken; 1 when the pair is refused, no engine
answers, the doctor found something broken or the benchmark a wrong byte; 2 when the input is invalid, or the benchmark
could not be made; 130 after Ctrl-C. A refused pair and the doctor's findings are printed on standard output, every
other error in one line on standard error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvferry.protocol.errors import InputError, KvferryError
from kvferry.protocol.visible import escape_logs, visible
from kvferry.version import __version__

GOOD = 0
NO_ANSWER = 1
BAD = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Without abbreviations of options, and with errors of one line."""

    def __init__(self, **options: object) -> None:
        # An abbreviation that is unique today is ambiguous with the next option.
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


class _Once(argparse.Action):
    """Stores the value of an option, and refuses a second one."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        # argparse would take the last one: of two `--request` the first would be forgotten without a word.
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "expected once")
        setattr(namespace, self.dest, values)


class Option(NamedTuple):
    """An argument of a command, or an option, whose names begin with a dash. A flag has no metavar."""

    name: str
    metavar: str
    help: str
    default: str | None = None
    nargs: str | None = None
    const: str | None = None


class Command(NamedTuple):
    """A command: `module:function` that runs it, its help, and its options."""

    run: str
    help: str
    description: str
    options: tuple[Option, ...]


def _json(what: str) -> Option:
    return Option("--json", "", f"print {what} as JSON")


_PLAN = (
    Option("producer", "PRODUCER", "the engine that prefills"),
    Option("consumer", "CONSUMER", "the engine that decodes"),
    Option(
        "--tokens", "N", "tokens of the prompt (default: 8192, or what the caches hold)"
    ),
    Option("--link", "G", "GB/s of every worker's link", "50"),
    Option(
        "--direct-min-bytes", "N", "the consumer's direct_min_bytes (default: 16384)"
    ),
    Option(
        "--staging-pool-bytes", "N", "the consumer's staging_pool_bytes, 0 for none"
    ),
    Option(
        "--same-host",
        "",
        "both engines are on one host, with caches in shared files: all of the producer's memory is mapped",
    ),
    _json("the plan"),
    Option("--svg", "FILE", "also draw the plan"),
    Option("--copies", "REQUEST", "print every copy for the blocks in this JSON file"),
    Option(
        "--out",
        "FILE",
        "a file for the output of --copies (default: standard output, without the table)",
    ),
)
_DESCRIBE = (
    Option("address", "HOST:PORT", "the producer's side channel, [host]:port for IPv6"),
    Option("--json", "", "print the description JSON that `kvferry plan` reads"),
    Option("--timeout", "S", "seconds to wait", "5"),
)
_DOCTOR = (
    _json("the findings"),
    Option(
        "--data-parallel-size",
        "N",
        "data-parallel ranks of an engine here: the port of each is tried",
        "1",
    ),
    Option("--timeout", "S", "seconds for all checks, which run at the same time", "8"),
)
_BENCH = (
    Option(
        "--listen",
        "HOST[:PORT]",
        "offer memory to one client (default: 0.0.0.0:5700)",
        nargs="?",
        # It is for other machines, and serves nothing but its own content.
        const="0.0.0.0",  # noqa: S104
    ),
    Option(
        "--allowed-hosts",
        "HOST,…",
        "addresses and networks from which a client may join a listener without a secret, or * for any "
        "(default: this host)",
    ),
    Option("--connect", "HOST[:PORT]", "read from this listener (default port: 5700)"),
    Option("--device", "D", "memory to read: auto, cpu or cuda", "auto"),
    Option("--max-size", "N", "largest read, up to 1G", "64M"),
    Option("--seconds", "S", "seconds to measure each row of the table", "0.5"),
    Option("--timeout", "S", "seconds to wait for a read, or an answer", "10"),
    _json("what was measured"),
)
_TRACE = (
    Option("dirs", "DIR", "folders, searched recursively, or *.jsonl files", nargs="+"),
    Option("-o --out", "OUT", "write a file for ui.perfetto.dev: .json or .json.gz"),
    Option(
        "--request", "ID", "only handovers with an id, of any kind, that contains this"
    ),
    Option("--slowest", "N", "number of handovers to show", "20"),
    _json("what was found"),
)

COMMANDS = {
    "plan": Command(
        "kvferry.cli.plan.command:run_plan",
        "show how one engine would read another's cache",
        "Shows how CONSUMER would read PRODUCER's cache, or why it cannot. Each side is a model with the engine's "
        "sizes (./config.json,tp=4, or a folder or a model of the local hub cache in the file's place), sizes alone "
        "(tp=2: the other side's model), a short form (layers=32,heads=8,dim=128,tp=4), or an engine's description "
        "JSON (a file, or - for standard input). Exit code 1: the pair is refused.",
        _PLAN,
    ),
    "describe": Command(
        "kvferry.cli.plan.describe:run_describe",
        "ask a running engine for its description",
        "Asks the engine whose side channel is at HOST:PORT for its description. Exit code 1: no engine answered.",
        _DESCRIBE,
    ),
    "doctor": Command(
        "kvferry.cli.doctor.command:run_doctor",
        "check this machine, and say what to type",
        "Checks versions, devices, UCX settings, limits, ports and the secret of this machine, and makes a "
        "loopback transfer. Run it like an engine: same user, container and environment. "
        "Exit code 1: something is broken.",
        _DOCTOR,
    ),
    "bench": Command(
        "kvferry.cli.bench.command:run_bench",
        "measure the fabric between two machines",
        "Reads memory of known content from one machine to another over NIXL, compares every byte and "
        "times the reads. Run it before you start an engine, --listen on one machine and --connect on the other, like "
        "engines: same user, container and environment. Exit code 1: a byte was wrong.",
        _BENCH,
    ),
    "trace": Command(
        "kvferry.cli.trace.command:run_trace",
        "show where the time of handovers went",
        "Merges the records of engines with `trace_dir` into one timeline per handover, the slowest first.",
        _TRACE,
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvferry",
        description="Plans, checks, measures and traces transfers of KV caches between engines.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"kvferry {__version__}",
        help="print the version",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(
            name, help=command.help, description=command.description
        )
        for option in command.options:
            _add(of_command, option)
    return parser


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    # Values stay text: a type of argparse's would name neither their limits nor their unit.
    names = option.name.split()
    if not option.metavar:
        parser.add_argument(*names, action="store_true", help=option.help)
        return
    text = option.help
    if option.default is not None:
        text = f"{text} (default: {option.default})"
    action: type[argparse.Action] | str = "store"
    if option.name.startswith("-"):
        action = _Once
    parser.add_argument(
        *names,
        action=action,
        metavar=option.metavar,
        help=text,
        default=option.default,
        nargs=option.nargs,
        const=option.const,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # None: it was closed before the start.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
    escape_logs()
    options = _parser().parse_args(arguments)
    # A terminal without Unicode gets question marks in place of a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        # Only its own modules are imported: `kvferry plan` must start in a fraction of a second, and the doctor where
        # packages are missing.
        module, _, function = COMMANDS[options.command].run.partition(":")
        code: int = getattr(importlib.import_module(module), function)(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvferryError as wrong:
        print(visible(f"kvferry {options.command}: {wrong}"), file=sys.stderr)
        # A script that waits for an engine tells "not yet" from a typing error.
        if options.command == "describe" and not isinstance(wrong, InputError):
            return NO_ANSWER
        return BAD
    except OSError as refused:
        # It is that of standard output; other files have errors of their own. What Python has yet to write there goes
        # nowhere, or it would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(refused, BrokenPipeError):
            return GOOD
        print(
            visible(f"kvferry {options.command}: the system refused: {refused}"),
            file=sys.stderr,
        )
        return BAD
    return code
