"""Real engines that start in seconds: vLLM's `LLMEngine` in a process forked from one that has imported vLLM.

    with ForkedEngine(EngineSpec("a", model, tp=2, role="kv_both"), logs) as engine:
        params = engine.prefill(prompt)
        other.ask(prompt, params)

Scheduler, connector, workers, caches, collectives and NIXL are those of a server; what is missing is HTTP, and vLLM's
workers are forked where they would be spawned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.devices import free_ports
from scripts.accuracy.metrics import Scrape, parse_metrics
from tests.forkserver import forkserver
from tests.vllm.forked_engine_child import (
    Answer,
    EngineSpec,
    early_bytes,
    flip_a_byte,
    main,
)
from tests.waiting import wait_until

START_S = 300.0
ANSWER_S = 180.0


class EngineFailed(Exception):
    """An engine did not execute a command; the text has the reason and the log's path."""


class ForkedEngine:
    """The parent's end. A context manager: leaving it ends the engine.

    Attributes:
        spec: as given.
        log_path: its output.
        port: of its side channel, on 127.0.0.1.
    """

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        self.spec = spec
        self.log_path = logs / f"{spec.name}.log"
        context = forkserver()
        self._pipe, theirs = context.Pipe()
        (self.port,) = free_ports(1)
        self._process = context.Process(
            target=main,
            args=(spec, self.port, theirs, str(self.log_path)),
            name=spec.name,
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> ForkedEngine:
        self._receive(START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(20.0)
        self._process.kill()
        self._process.join()

    def prefill(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Prefill for another engine; the params of the answer."""
        params = self.answer(prompt, ASK_FOR_PREFILL, 1, **more).params
        assert params, "no params came back"
        return params

    def ask(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        tokens: int = 8,
        **more: Any,
    ) -> list[int]:
        """The tokens of a greedy answer."""
        return self.answer(prompt, params, tokens, **more).tokens

    def answer(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        tokens: int = 8,
        **more: Any,
    ) -> Answer:
        """A greedy answer. `more`: see `Engine.ask` of the child."""
        answer = self._call(
            "ask", list(prompt), tokens, dict(params) if params else None, more
        )
        assert isinstance(answer, Answer)
        return answer

    def begin(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        tokens: int = 8,
        **more: Any,
    ) -> str:
        """A request that is served while other commands come; its id."""
        name = self._call(
            "begin", list(prompt), tokens, dict(params) if params else None, more
        )
        return str(name)

    def hold_at(self, tokens: int | None) -> None:
        """Take no step while as many tokens of any request are computed; None: go on."""
        self._call("hold_at", tokens)

    def early_bytes(self) -> int:
        """What all workers have read so far of prompts that are still computed."""
        return sum(self.on_workers(early_bytes))

    def result(self, name: str) -> Answer:
        """The answer to a request that was begun."""
        found: list[Answer] = []

        def is_there() -> bool:
            found.extend(filter(None, [self._call("result", name)]))
            return bool(found)

        wait_until(is_there, f"{self.spec.name} answers {name}", timeout_s=ANSWER_S)
        return found[0]

    def abort(self, name: str) -> None:
        """End a request that was begun."""
        self._call("abort", name)

    def sleep(self, level: int = 1) -> None:
        """Put the engine to sleep; it must be able to (`enable_sleep_mode`)."""
        self._call("sleep", level)

    def wake_up(self) -> None:
        """Wake the engine, all of it."""
        self._call("wake_up")

    def kill(self) -> None:
        """End the process as a fault does."""
        self._process.kill()
        self._process.join()

    def metrics(self) -> Scrape:
        """The metrics that a server's `/metrics` would have."""
        return parse_metrics(self._call("metrics"))

    def free_blocks(self) -> int:
        """Blocks that the scheduler can give away."""
        return int(self._call("free_blocks"))

    def flip_a_byte(self, layer: str, block: int, state: int = 0) -> None:
        """Invert the sign of a number in a block, on every worker: one bit of one byte.

        Args:
            state: which one, of a layer that has several.
        """
        self.on_workers(flip_a_byte, layer, block, state)

    def on_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns for each worker and these arguments, in the worker's process."""
        return list(self._call("on_workers", function, arguments))

    def groups(self) -> list[list[str]]:
        """The layers of every cache group that is transferred, in the order of `remote_block_ids`."""
        return [list(layers) for layers in self._call("groups")]

    def _call(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._receive(ANSWER_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise EngineFailed(
                f"{self.spec.name}: no answer within {timeout_s:g} s; see {self.log_path}"
            )
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise EngineFailed(
                f"{self.spec.name} has ended; see {self.log_path}"
            ) from None
        if error:
            raise EngineFailed(f"{self.spec.name}: {error}\nsee {self.log_path}")
        return answer


def start(
    running: ExitStack, logs: Path, specs: Iterable[EngineSpec]
) -> list[ForkedEngine]:
    """Engines that start side by side and end with `running`."""
    engines = [ForkedEngine(spec, logs) for spec in specs]
    for engine in engines:
        running.push(engine)
    for engine in engines:
        engine.__enter__()
    return engines


def hand_over_at_once(
    producer: ForkedEngine,
    consumer: ForkedEngine,
    prompt: Sequence[int],
    name: str,
    held_at: int,
) -> tuple[Answer, Scrape]:
    """Both legs of a request together, as routers send them: the answer, and what the consumer has counted meanwhile.
    They have handed over before.

    Args:
        held_at: with so many tokens computed the producer takes no step until the consumer has read any of them. A
            small model computes a prompt in less time than a busy machine lets the consumer begin.
    """
    params, free, before = (
        producer.prefill(prompt[:2]),
        producer.free_blocks(),
        consumer.metrics(),
    )
    consumer.answer(prompt[:2], params)
    kept = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
    leg = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": name,
    }
    leg |= {key: params[key] for key in kept}
    producer.hold_at(held_at)
    prefill = producer.begin(prompt, ASK_FOR_PREFILL, 1, id=name)
    decode = consumer.begin(prompt, leg, id=name)
    wait_until(consumer.early_bytes, "a part is read early", timeout_s=ANSWER_S)
    producer.hold_at(None)
    assert producer.result(prefill).params
    found = consumer.result(decode)
    wait_until(
        lambda: producer.free_blocks() >= free,
        "the producer has its blocks back",
        timeout_s=60,
    )
    return found, consumer.metrics() - before


def hand_over(
    producer: ForkedEngine,
    consumer: ForkedEngine,
    prompt: Sequence[int],
    tokens: int = 8,
    **more: Any,
) -> tuple[Answer, int]:
    """A prompt prefilled by one and decoded by the other: the answer, and the bytes that were moved for it.

    As many as the plan says, by NIXL's count, or mapped; nothing was computed, and the producer has its blocks back.
    """
    free, before = producer.free_blocks(), consumer.metrics()
    answer = consumer.answer(prompt, producer.prefill(prompt, **more), tokens, **more)
    counted = consumer.metrics() - before
    reasons = counted.by_label("vllm:kvferry_local_recomputes_total", "reason")
    assert (reasons, counted.total("vllm:kvferry_loads_total")) == ({}, 1)
    mapped = counted.total("vllm:kvferry_mapped_bytes_total")
    read = mapped + counted.total("vllm:nixl_bytes_transferred_sum")
    assert read == counted.total("vllm:kvferry_planned_bytes_total")
    wait_until(
        lambda: producer.free_blocks() == free,
        "the producer has its blocks back",
        timeout_s=60,
    )
    return answer, int(read)


def difference(one: Answer, other: Answer) -> float:
    """The largest of their log-probabilities; infinite when the tokens differ."""
    if one.tokens != other.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
