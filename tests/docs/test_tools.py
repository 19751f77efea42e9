"""Commands of the documentation that look at a machine, an engine or a fabric: run as they stand on the page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.cli.plan.short_form import read_short_form
from kvferry.protocol.description_json import decode_engine_json, encode_engine_json, engine_of
from scripts.doc_commands import checked_by
from tests.docs.shell import ROOT, Shell, succeeded
from tests.protocol.samples import KEY
from tests.scheduler.channel import HOST, free_port, listening

pytestmark = pytest.mark.slow

_HERE = "tests/docs/test_tools.py::"
SHORTER = "--max-size 64K --seconds 0.02 --device cpu"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell.within(tmp_path)


def test_the_doctor_looks_at_this_machine(shell: Shell) -> None:
    typed = {command.text for command in checked_by(f"{_HERE}test_the_doctor_looks_at_this_machine")}
    assert typed == {"kvferry doctor", "kvferry doctor --data-parallel-size 8 --json"}
    done = shell.run("kvferry doctor --data-parallel-size 8 --json")
    assert '"kvferry_doctor": 1' in succeeded(done, 0, 1)
    assert '"check": "loopback' in done.stdout
    done = shell.run("kvferry doctor")
    assert re.search(r"^\w+ +python +3\.", succeeded(done, 0, 1), re.MULTILINE)
    assert re.search(r"^\d+ ok", done.stdout, re.MULTILINE)


@contextmanager
def prefill(form: str) -> Iterator[str]:
    """An engine that describes itself; gives its address."""
    with listening() as (listener, port):
        engine = engine_of_form(read_short_form(form), "prefill-0")
        listener.publish(msgspec.structs.replace(engine_of(engine), mac_key=KEY, boot="ab" * 16))
        yield f"{HOST}:{port}"


def test_engines_are_described_and_planned(shell: Shell) -> None:
    typed = [command.text for command in checked_by(f"{_HERE}test_engines_are_described_and_planned")]
    assert len(typed) == 4
    decode = engine_of_form(read_short_form("layers=32,heads=8,dim=128,tp=4"), "decode-0")
    (shell.folder / "decode.json").write_bytes(encode_engine_json(decode))
    with prefill("layers=32,heads=8,dim=128,tp=2") as address:
        for text in sorted(typed, key=lambda text: "describe" not in text):
            here = text.replace("prefill-0:5600", address).replace("/var/lib/kvferry/decode.json", "decode.json")
            printed = succeeded(shell.run(here))
            if "kvferry plan" in here:
                assert "predicted:" in printed
    assert decode_engine_json((shell.folder / "prefill.json").read_bytes()).engine_id == "prefill-0"


@contextmanager
def listener(shell: Shell, text: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """The end that offers memory, once; it has said that it listens."""
    here = (
        text.split("#")[0].replace("--listen", f"--listen {HOST}:{port} --once") + f" {SHORTER.partition(' --sec')[0]}"
    )
    process = subprocess.Popen(
        ["bash", "-c", f"exec {here}"],
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"listening on {HOST}:{port}"), said
        yield process
        process.wait(timeout=60)
    finally:
        process.kill()
        process.communicate()


def test_one_end_reads_what_the_other_offers(shell: Shell) -> None:
    typed = [command.text for command in checked_by(f"{_HERE}test_one_end_reads_what_the_other_offers")]
    assert len(typed) == 4
    port = free_port()
    elsewhere = re.compile(r"(--connect) \S+")
    reads = {elsewhere.sub(rf"\1 {HOST}:{port}", text.split("#")[0]).strip() for text in typed if "--connect" in text}
    (offers,) = {text.split("#")[0].strip() for text in typed if "--listen" in text}
    (reads_here,) = reads
    with listener(shell, offers, port) as process:
        printed = succeeded(shell.run(f"{reads_here} {SHORTER}"))
    assert re.search(r"^every byte of .* is right$", printed, re.MULTILINE)
    assert process.returncode == 0


def test_a_guard_that_is_off_fails_its_tests() -> None:
    (command,) = checked_by(f"{_HERE}test_a_guard_that_is_off_fails_its_tests")
    shell = Shell(ROOT, ROOT)
    done = shell.run(f"{command.text} -q -p no:cacheprovider -k fail_by_their_mac")
    assert re.search(r"\b\d+ failed", succeeded(done, 1)), done.stdout
    assert " passed" not in done.stdout.splitlines()[-1]
