"""The commands of docs/performance.md: each is read by its own parser, and the quick ones run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.doc_commands import Command, checked_by
from tests.docs.shell import ROOT, Shell, succeeded

PARSED = checked_by("tests/docs/test_benchmarks.py::test_its_own_parser_takes_the_command_line")
QUICK = checked_by("tests/docs/test_benchmarks.py::test_it_runs_in_small")
# Ends each script as soon as it has read its command line; one that reads none would run, and is stopped by the time.
_PARSE = """
import argparse, json, runpy, sys
class Parsed(Exception):
    pass
parse = argparse.ArgumentParser.parse_args
def read(self, *given):
    raise Parsed(vars(parse(self, *given)))
argparse.ArgumentParser.parse_args = read
for words in json.load(sys.stdin):
    sys.argv = words[1:]
    try:
        runpy.run_module(words[1], run_name="__main__")
    except Parsed as parsed:
        print(json.dumps([words[1], parsed.args[0]], default=str))
    except SystemExit:
        print(json.dumps([words[1], None]))
"""


def parsed(lines: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Results of the scripts' parsers for command lines: `[[module, options], …]`, one a line."""
    return subprocess.run(
        [sys.executable, "-c", _PARSE], input=json.dumps(lines), capture_output=True, text=True, cwd=ROOT, timeout=100
    )


def words(command: Command) -> list[str]:
    python, option, *rest = command.text.split()
    assert (python, option) == ("python", "-m")
    return ["-m", *rest]


def test_its_own_parser_takes_the_command_line() -> None:
    assert len(PARSED) >= 5
    done = parsed([*(words(command) for command in PARSED), ["-m", "bench.soak", "--fly"]])
    *found, (_, refused) = [json.loads(line) for line in succeeded(done).splitlines()]
    assert [name for name, options in found if options is not None] == [words(command)[1] for command in PARSED]
    assert refused is None
    assert "unrecognized arguments: --fly" in done.stderr
    (soak,) = (options for name, options in found if name == "bench.soak")
    (line,) = (command.text for command in PARSED if "bench.soak" in command.text)
    assert f"--requests {soak['requests']}" in line


@pytest.mark.parametrize("command", QUICK, ids=[command.text for command in QUICK])
def test_it_runs_in_small(command: Command, tmp_path: Path) -> None:
    (name,) = (word for word in words(command) if word.startswith("bench."))
    before = sorted((ROOT / "bench" / "results").glob("*.json"))
    stamps = [path.stat().st_mtime_ns for path in before]
    done = Shell(ROOT, tmp_path).run(f"{command.text} --quick", {"NO_COLOR": "1", "PYTHONPATH": os.fspath(ROOT)})
    assert f"{name.partition('.')[2]}" in succeeded(done)
    assert "A quick run: for orientation, not to be published." in done.stdout
    assert [path.stat().st_mtime_ns for path in before] == stamps, "published figures were overwritten"
