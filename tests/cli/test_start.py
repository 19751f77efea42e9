"""Start of the command: its name, no import of torch, and a quiet end when its reader closes the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.cli.plan.forms import DENSE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "nixl", "vllm", "triton", "transformers")
LOADED = """
import sys
from kvferry.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted({{name.partition(".")[0] for name in sys.modules}} & {heavy!r}), file=sys.stderr)
"""


def heavy_modules(*arguments: str, heavy: tuple[str, ...] = HEAVY) -> str:
    script = LOADED.format(heavy=set(heavy))
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=True
    ).stderr.splitlines()[-1]


@pytest.mark.parametrize("form", [(), ("--json",), ("--svg", "/dev/null")])
def test_planning_loads_neither_torch_nor_nixl_nor_sockets(form: tuple[str, ...]) -> None:
    assert heavy_modules("plan", DENSE, f"{DENSE},tp=2", *form, heavy=(*HEAVY, "zmq")) == "0"


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (("describe", "127.0.0.1:1", "--timeout", "0.1"), {"1"}),
        (("bench", "--connect", "127.0.0.1:1", "--timeout", "0.1"), {"2"}),
        (("doctor", "--timeout", "0.1"), {"0", "1"}),
    ],
)
def test_torch_and_nixl_are_loaded_in_child_processes_only(arguments: tuple[str, ...], codes: set[str]) -> None:
    code, *found = heavy_modules(*arguments).split()
    assert (code in codes, found) == (True, [])


def test_help_names_every_option_of_the_documentation() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for command in ("plan", "describe", "doctor", "bench"):
        ran = run(command, "--help")
        assert ran.code == 0
        options = {word.strip(",[]") for word in ran.out.split() if word.startswith(("--", "[--"))} - {"--help"}
        assert options
        for option in options:
            assert f"`{option}" in page, option


def test_a_closed_pipe_ends_it_quietly() -> None:
    """More output than a pipe holds, to a reader that reads ten bytes."""
    large = "layers=64,heads=8,dim=128,tp=8,layout=NHD"
    command = [sys.executable, "-m", "kvferry", "plan", large, f"{large},pp=8", "--json"]
    assert len(run(*command[3:]).out) > 1 << 16
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as planning:
        assert planning.stdout is not None
        assert planning.stderr is not None
        planning.stdout.read(10)
        planning.stdout.close()
        assert planning.stderr.read() == b""
    assert planning.returncode == 0


def test_a_pipe_gets_80_columns() -> None:
    command = [sys.executable, "-m", "kvferry", "plan", "layers=32,heads=8,dim=64,tp=8,pp=2", "tp=3"]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ)
    assert 70 < max(map(len, ran.stdout.splitlines())) <= 80


def test_a_terminal_without_unicode_gets_question_marks_and_no_traceback() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry", "plan", DENSE, f"{DENSE},tp=2"],
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"Traceback" not in ran.stderr
    assert b"tp0?1" in ran.stdout
