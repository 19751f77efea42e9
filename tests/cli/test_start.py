"""Start and end of the command: no import of torch, and no traceback where its output or its user leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
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
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stderr.splitlines()[-1]


@pytest.mark.parametrize("form", [(), ("--json",), ("--svg", "/dev/null")])
def test_planning_loads_neither_torch_nor_nixl_nor_sockets(
    form: tuple[str, ...],
) -> None:
    assert (
        heavy_modules("plan", DENSE, f"{DENSE},tp=2", *form, heavy=(*HEAVY, "zmq"))
        == "0"
    )


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (("describe", "127.0.0.1:1", "--timeout", "0.1"), {"1"}),
        (("bench", "--connect", "127.0.0.1:1", "--timeout", "0.1"), {"2"}),
        (("doctor", "--timeout", "0.1"), {"0", "1"}),
    ],
)
def test_torch_and_nixl_are_loaded_in_child_processes_only(
    arguments: tuple[str, ...], codes: set[str]
) -> None:
    code, *found = heavy_modules(*arguments).split()
    assert (code in codes, found) == (True, [])


def test_help_names_every_option_of_the_documentation() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for command in ("plan", "describe", "doctor", "bench"):
        ran = run(command, "--help")
        assert ran.code == 0
        options = {
            word.strip(",[]")
            for word in ran.out.split()
            if word.startswith(("--", "[--"))
        } - {"--help"}
        assert options
        for option in options:
            assert f"`{option}" in page, option


@pytest.mark.parametrize(
    ("shell", "code", "err"),
    [
        ("{plan} --json | head -c 10", 0, ""),
        ("{plan} | true", 0, ""),
        (
            "{plan} > /dev/full",
            2,
            "kvferry plan: the system refused: [Errno 28] No space left on device\n",
        ),
        (
            "{plan} --json > /dev/full",
            2,
            "kvferry plan: the system refused: [Errno 28] No space left on device\n",
        ),
        ("{plan} >&-", 0, ""),
        (
            "{kvferry} plan - layers=4,heads=8,dim=128 <&-",
            2,
            "kvferry plan: PRODUCER: description JSON: ",
        ),
        ("{kvferry} trace nowhere 2>&-", 2, ""),
    ],
)
def test_an_output_that_is_closed_or_full_ends_it_without_a_traceback(
    shell: str, code: int, err: str
) -> None:
    """With more output than a pipe holds."""
    kvferry, large = (
        f"{sys.executable} -m kvferry",
        "layers=64,heads=8,dim=128,tp=8,layout=NHD",
    )
    command = shell.format(kvferry=kvferry, plan=f"{kvferry} plan {large} {large},pp=8")
    ran = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (code, min(1, len(err)))
    assert ran.stderr.startswith(err)


def test_ctrl_c_ends_it_at_once_and_without_a_traceback() -> None:
    """While it asks a listener that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "kvferry",
            "describe",
            address,
            "--timeout",
            "60",
        ]
        heed = partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        )  # what a shell starts with & ignores it
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed
        ) as asking:
            connection, _ = server.accept()
            with connection:
                asking.send_signal(signal.SIGINT)
                assert asking.communicate(timeout=30)[0] == b""
    assert asking.returncode == 130


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
