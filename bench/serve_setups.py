"""The setups that are compared: which engines, with which connector, and whether a router stands in front."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve_clock import FILE_VARIABLE, AnswerClock, Answers
from scripts.accuracy.devices import hand_out_gpus, visible_gpus
from scripts.accuracy.engines import Engine, EngineSpec, Router, Transfer
from scripts.accuracy.processes import Server

START_S = 300.0
CHUNK = 128
"""Tokens that an engine which prefills computes in a step, in every setup."""
_SEVERAL_TURNS_S = "3600"
"""How long an engine's server keeps a connection: its router's have to survive the turns of the other setups."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One of the compared setups.

    Attributes:
        module: of the connector; empty for a single engine without one.
        title: for people.
        options: the connector's.
    """

    name: str
    title: str
    module: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


SINGLE = Setup("single", "one engine, no connector")
KVFERRY = Setup(
    "kvferry",
    "kvferry, read during the prefill",
    "kvferry.connector",
    {"streaming": "auto"},
)
OFF = Setup(
    "off", "kvferry, read after the prefill", "kvferry.connector", {"streaming": "off"}
)
CALM = Setup("calm", "NixlConnector", "bench.stock_calm")
SETUPS = (SINGLE, KVFERRY, OFF, CALM)


@dataclass(frozen=True, slots=True)
class Running:
    """A setup's servers, stopped (SIGSTOP) unless they are `awake`. Of a single engine, producer and consumer are that
    engine, and `url` is its own."""

    producer: Engine
    consumer: Engine
    url: str
    servers: tuple[Server, ...]
    answers: Answers

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Each engine once."""
        return (
            (self.producer,)
            if self.producer is self.consumer
            else (self.producer, self.consumer)
        )

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the servers run in the body."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for server in self.servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, number)


def specs_of(
    setup: Setup, model: str, logs: Path, device: str = "cpu"
) -> tuple[EngineSpec, ...]:
    """One core, or GPU, for every engine, the single one included: the one that the decoder has in the others. With
    one GPU, or CUDA_VISIBLE_DEVICES=0,0, all share it."""
    here, there = (
        hand_out_gpus((1, 1), visible_gpus(os.environ))
        if device == "cuda"
        else (("0",), ("1",))
    )
    if not setup.module:
        return (_spec(setup, "engine", model, there, logs, device),)
    return _spec(setup, "producer", model, here, logs, device), _spec(
        setup, "consumer", model, there, logs, device
    )


def _spec(
    setup: Setup,
    role: str,
    model: str,
    devices: tuple[str, ...],
    logs: Path,
    device: str,
) -> EngineSpec:
    environment = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _SEVERAL_TURNS_S}
    # Blocks of 128 tokens. On a GPU they have 16; vLLM's look at its free memory fails where engines start together.
    on_gpu = device == "cuda"
    arguments = (
        ["--kv-cache-memory-bytes", str(1 << 30)]
        if on_gpu
        else ["--num-gpu-blocks-override", "96"]
    )
    if role != "consumer":
        arguments += ["--max-num-batched-tokens", str(CHUNK)]
    if role == "producer":
        arguments += [
            "--middleware",
            f"{AnswerClock.__module__}.{AnswerClock.__name__}",
        ]
        environment[FILE_VARIABLE] = str(answers_file(setup, logs))
    options = dict(setup.options) and {
        **setup.options,
        "trace_dir": str(logs / f"traces-{setup.name}"),
    }
    return EngineSpec(
        f"{setup.name}-{role}",
        model,
        device=device,
        devices=devices,
        dtype="float32" if device == "cpu" else "bfloat16",
        gpu_memory_utilization=0.1,
        transfer=Transfer(f"kv_{role}", setup.module, extra_config=options)
        if setup.module
        else None,
        extra_args=tuple(arguments),
        extra_env=environment,
    )


def answers_file(setup: Setup, logs: Path) -> Path:
    """Where the setup's producer writes when its answers were ready."""
    return logs / f"{setup.name}-answers.txt"


@contextmanager
def started(
    setup: Setup, model: str, logs: Path, timeout_s: float, device: str = "cpu"
) -> Iterator[Running]:
    """Start a setup and end it; all of its servers are ready and stopped in the body."""
    answers = Answers(answers_file(setup, logs))
    with ExitStack() as stack:
        engines = start_all(stack, specs_of(setup, model, logs, device), logs)
        producer, consumer = engines[0], engines[-1]
        servers: list[Server] = [*engines]
        if producer is not consumer:
            router = Router(
                [producer.base_url], [consumer.base_url], logs / setup.name, timeout_s
            )
            servers.append(stack.enter_context(router))
            router.wait_ready(60)
        running = Running(
            producer, consumer, servers[-1].base_url, tuple(servers), answers
        )
        stack.callback(
            running.signal, signal.SIGCONT
        )  # a stopped process does not obey SIGTERM
        running.signal(signal.SIGSTOP)
        yield running


def start_all(
    stack: ExitStack, specs: Sequence[EngineSpec], logs: Path
) -> list[Engine]:
    """Start engines together, to be ended with the stack, and wait until all are ready."""
    engines = [stack.enter_context(Engine(spec, logs)) for spec in specs]
    for engine in engines:
        engine.wait_ready(START_S)
    return engines


def short(error: Exception) -> str:
    """An error in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' … '.join([*lines[:1], *lines[-3:]] if len(lines) > 4 else lines)}"[
        :1000
    ]
