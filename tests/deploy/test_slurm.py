"""deploy/slurm: run with stand-ins for Slurm's commands and for the programs that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_router.launch_router import parse_router_args

from tests.deploy.judging import judge_transfer_config, programs
from tests.deploy.launches import DEPLOY, LAUNCHES, Launch
from tests.waiting import wait_until

SCRIPT = DEPLOY / "slurm" / "two_nodes.sbatch"
OF_ENGINES = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "KVFERRY_SECRET_FILE",
)
# Writes down what it was started with, and how it ends; `srun` starts what follows its options, as a step would.
STAND_IN = """#!{python}
import json, os, signal, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
path = os.path.join({folder!r}, f"{{os.getpid()}}.json")
environment = {{name: os.environ.get(name, "") for name in {names!r}}}
def ended(*_):
    open(path + ".ended", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
open(path + ".new", "w").write(json.dumps({{"words": words, "environment": environment}}))
os.rename(path + ".new", path)
while True:
    signal.pause()
"""


@dataclass
class Job:
    """The script, running.

    Attributes:
        started: where stand-ins write what they were started with.
        home: where the script keeps its secret.
    """

    process: subprocess.Popen[str]
    started: Path
    home: Path

    def launches(self) -> list[Launch]:
        found = [
            json.loads(path.read_text()) for path in sorted(self.started.glob("*.json"))
        ]
        return [
            Launch("slurm", tuple(entry["words"]), entry["environment"], 330.0)
            for entry in found
        ]


def all_started(folder: Path) -> bool:
    return len(list(folder.glob("*.json"))) == 3


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    bin_folder, venv, started, home = (
        tmp_path / name for name in ("bin", "venv", "started", "home")
    )
    for folder in (bin_folder, venv / "bin", started, home):
        folder.mkdir(parents=True)
    python = programs() / "python"
    stand_in = STAND_IN.format(python=python, folder=str(started), names=OF_ENGINES)
    scripts = {
        bin_folder / "srun": stand_in,
        venv / "bin" / "vllm-router": stand_in,
        bin_folder / "scontrol": "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n",
    }
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    environment = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "VENV": str(venv),
    }
    process = subprocess.Popen(
        ["bash", SCRIPT],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Job(process, started, home)
    try:
        wait_until(
            lambda: all_started(started) or process.poll() is not None,
            "two steps and the router have started",
            30,
        )
        assert process.poll() is None, process.communicate()[0]
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def engines(job: Job) -> list[Launch]:
    """Job steps without the arguments of `srun`: from the program on."""
    steps = [launch for launch in job.launches() if launch.program == "srun"]
    found = []
    for step in steps:
        start = next(i for i, word in enumerate(step.words) if word.endswith("/vllm"))
        (node,) = step.options("--nodelist")
        found.append(
            Launch(f"slurm {node}", step.words[start:], step.environment, step.grace_s)
        )
    return sorted(found, key=lambda launch: launch.source)


def test_shellcheck_has_no_complaints() -> None:
    done = subprocess.run(
        [programs() / "shellcheck", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_each_node_has_an_engine_that_decoders_reach_by_the_nodes_name(
    job: Job,
) -> None:
    prefill, decode = engines(job)
    roles = [
        judge_transfer_config(launch.option("--kv-transfer-config"))[0]
        for launch in (prefill, decode)
    ]
    assert roles == ["kv_producer", "kv_consumer"]
    assert [
        launch.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        for launch in (prefill, decode)
    ] == [
        "node-a",
        "node-b",
    ]
    assert {
        launch.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        for launch in (prefill, decode)
    } == {"5600"}
    known = {
        word.partition("=")[0]
        for launch in LAUNCHES
        for word in launch.words
        if word.startswith("--")
    }
    for launch in (prefill, decode):
        assert {
            word.partition("=")[0] for word in launch.words if word.startswith("--")
        } <= known


def test_the_router_lists_both_engines(job: Job) -> None:
    (router,) = (launch for launch in job.launches() if launch.program == "vllm-router")
    parsed = parse_router_args(list(router.words[1:]))
    prefill, decode = engines(job)
    assert parsed.prefill_urls == [(f"http://node-a:{prefill.option('--port')}", None)]
    assert parsed.decode_urls == [f"http://node-b:{decode.option('--port')}"]
    others = [
        launch
        for launch in LAUNCHES
        if not launch.is_engine and launch.source.startswith("systemd")
    ]
    assert router.option("--request-timeout-secs") == others[0].option(
        "--request-timeout-secs"
    )


def test_at_the_end_everything_is_asked_to_end_and_the_secret_is_gone(job: Job) -> None:
    job.process.send_signal(signal.SIGTERM)
    job.process.communicate(timeout=30)
    assert len(list(job.started.glob("*.ended"))) == 3
    assert list(job.home.iterdir()) == []
    assert job.process.returncode == 128 + signal.SIGTERM


def test_the_job_ends_when_an_engine_ends(job: Job) -> None:
    pid = next(
        int(path.stem)
        for path in job.started.glob("*.json")
        if '"srun"' in path.read_text()
    )
    os.kill(pid, signal.SIGKILL)
    job.process.communicate(timeout=30)
    assert job.process.returncode == 128 + signal.SIGKILL
    assert len(list(job.started.glob("*.ended"))) == 2
