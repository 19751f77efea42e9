"""`kvferry bench` in normal use: a listener and a client, real processes that read over NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvferry.cli.bench.client import run_client
from kvferry.cli.bench.command import print_outcome
from kvferry.cli.transfer.child import Outcome
from kvferry.cli.transfer.messages import Measured, ReadsFailed
from kvferry.cli.transfer.process import RUN_BYTES
from tests.cli.bench_listener import TASK, bench_listening
from tests.cli.command import refused, run
from tests.cli.owners import CHANGED, OFFER, READS, scripted
from tests.link.channel import HOST, free_port

pytestmark = pytest.mark.slow

QUICK = ("--seconds", "0.02", "--timeout", "60")
LYING = ("-m", "tests.cli.owners", "lying")
BENCH = (sys.executable, "-m", "kvferry", "bench")


@contextlib.contextmanager
def listener_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A listener that is ready, and its address."""
    address = f"{HOST}:{free_port()}"
    command = [*BENCH, "--listen", address, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as listening:
        assert listening.stderr is not None
        try:
            assert listening.stderr.readline().startswith(
                f"listening on {address} without a secret, with DRAM"
            )
            yield listening, address
        finally:
            listening.send_signal(signal.SIGCONT)
            listening.terminate()


def test_two_processes_read_every_size_and_every_byte_is_right() -> None:
    with listener_process("--max-size", "256K", "--device", "cpu") as (
        listening,
        address,
    ):
        ran = run("bench", "--connect", address, "--json", *QUICK)
        assert (ran.code, ran.err) == (0, "")
        found: dict[str, Any] = json.loads(ran.out)
        assert found["right"] is True
        sizes = [
            (reads["num_bytes"] >> 10, reads["descriptors"]) for reads in found["reads"]
        ]
        assert sizes == [(4, 1), (16, 1), (64, 1), (64, 4), (256, 1), (256, 16)]
        for reads in found["reads"]:
            assert reads["wrong"] == 0
            assert reads["reads"] >= 5
            assert reads["checked"] == (reads["reads"] + 3) * reads["num_bytes"]
            assert 0 < reads["p50_us"] <= reads["p99_us"]
            assert reads["gb_s"] == pytest.approx(
                reads["num_bytes"] / reads["p50_us"] / 1e3
            )
        assert found["first_contact_ms"] > 0
        assert found["transports"]
        assert listening.wait(timeout=30) == 0


def test_a_byte_that_was_changed_is_found_in_every_read_that_has_it_and_in_no_other() -> (
    None
):
    with bench_listening(LYING) as served:
        ran = run(
            "bench",
            "--connect",
            f"{HOST}:{served.port}",
            "--json",
            "--device",
            "cpu",
            *QUICK,
        )
        assert ran.code == 1
        found: dict[str, Any] = json.loads(ran.out)
        assert found["right"] is False
        by_size = {
            (reads["num_bytes"], reads["descriptors"]): reads
            for reads in found["reads"]
        }
        assert by_size[4 << 10, 1]["wrong"] == 0
        for size in (16 << 10, 64 << 10):
            reads = by_size[size, 1]
            assert (reads["wrong"], reads["first_wrong"]) == (
                reads["reads"] + 3,
                CHANGED,
            )
        scattered = by_size[64 << 10, 4]
        assert scattered["wrong"] == scattered["reads"] + 3
        assert scattered["first_wrong"] % RUN_BYTES == CHANGED
    assert served.codes == [1]
    assert any("bytes were WRONG" in line for line in served.said)


def test_a_listener_that_freezes_is_reported_within_the_deadline_with_a_hint() -> None:
    """During the measurements: without an answer of the listener the client gives up, even if reads succeed."""
    with listener_process("--max-size", "16M", "--device", "cpu") as (
        listening,
        address,
    ):
        command = [
            *BENCH,
            "--connect",
            address,
            "--seconds",
            "300",
            "--timeout",
            "2",
            "--device",
            "cpu",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as client:
            assert listening.stderr is not None
            assert listening.stderr.readline().endswith(" reads\n")
            listening.send_signal(signal.SIGSTOP)
            try:
                out, err = client.communicate(timeout=120)
            finally:
                client.kill()
        assert (client.returncode, out) == (2, "")
        assert err.count("\n") == 1
        assert "did not answer within 2 s" in err
        assert (
            "check the port, firewalls between, UCX_NET_DEVICES and `kvferry doctor`"
            in err
        )


CRASHES_ITS_OWNER = """
pipe.send(replace(OFFER, agent_metadata=b'crash'))
while True:
    pipe.take()
"""


def test_a_listener_whose_nixl_dies_of_this_clients_metadata_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.cli.bench.client.ALIVE_S", 0.05)
    with (
        bench_listening() as served,
        pytest.raises(ReadsFailed, match=r"session is ended: .* signal 6.*check"),
    ):
        run_client(served.session(), TASK, lambda _: None, scripted(CRASHES_ITS_OWNER))
    assert served.codes == [2]


def test_a_missing_gpu_that_was_requested_is_reported_in_one_line() -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    said = refused("bench", "--listen", f"{HOST}:{free_port()}", "--device", "cuda")
    assert "no GPU memory here" in said
    assert "--device cpu" in said


def test_the_table_distinguishes_wrong_and_right_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    wrong = msgspec.structs.replace(
        READS, wrong=3, first_wrong=17, kind="VRAM", p50_us=655.36
    )
    measured = Measured(first_contact_ms=1.0, reads=(READS, wrong))
    print_outcome(Outcome(OFFER.host, "rc", measured))
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "host 64 KiB 4 9 2 32.8 123 right" in rows
    assert "GPU 64 KiB 4 9 0.1 655 123 3 of 786432 WRONG, the first at 17" in rows
    assert "3 of 1572864 bytes are WRONG: do not run engines over this" in rows
    assert "listener p0, over rc" in rows
