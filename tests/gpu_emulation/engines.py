"""Engines on the emulated GPU, and what a handover between two of them must show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.accuracy.model import default_cache_dir
from tests.vllm.forked_engine import ForkedEngine, difference, hand_over, start
from tests.vllm.forked_engine_child import Answer, EngineSpec
from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY, small_model

NOISE = 1e-3
"""Log-probabilities in float32 differ by less when the same is computed in another order."""

MAPPED: Mapping[str, Any] = {"mapped_reads": "cuda_ipc"}
"""Of the connector: a consumer reads the cache where it lies."""

_ENGINE_ARGS: Mapping[str, Any] = {
    "max_model_len": 256,
    # The interpreter takes seconds for what a GPU does in microseconds: small steps, few tokens.
    "max_num_batched_tokens": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 16 << 20,
}


@dataclass(frozen=True)
class Settings:
    """How an engine is started.

    Attributes:
        block_size: tokens.
        layout: NHD or HND; empty for vLLM's choice.
        backend: of attention; empty for vLLM's choice.
        engine_args: more of vLLM's `EngineArgs`.
        environment: variables of its process.
        extra_config: of the connector.
    """

    block_size: int = 16
    layout: str = ""
    backend: str = "TRITON_ATTN"
    dtype: str = "float32"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_config: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, name: str, model: str, role: str = "") -> EngineSpec:
        """The engine of this name."""
        attention = (
            {"attention_config": {"backend": self.backend}} if self.backend else {}
        )
        layout = {"VLLM_KV_CACHE_LAYOUT": self.layout} if self.layout else {}
        return EngineSpec(
            name,
            str(small_model(model, default_cache_dir())),
            role,
            block_size=self.block_size,
            engine_args={
                **_ENGINE_ARGS,
                "dtype": self.dtype,
                **attention,
                **self.engine_args,
            },
            environment={**layout, **self.environment},
            extra_config=self.extra_config,
        )


def prompt_of(length: int, number: int = 0) -> list[int]:
    """A prompt, another one for every number."""
    span = VOCABULARY - FIRST_TOKEN
    return [
        FIRST_TOKEN + (7 * at * at + 11 * at + 131 * number) % span
        for at in range(length)
    ]


@dataclass(frozen=True)
class Trio:
    """A producer, a consumer, and an engine without a connector that is set up as the consumer."""

    producer: ForkedEngine
    consumer: ForkedEngine
    alone: ForkedEngine

    @staticmethod
    def start(
        running: ExitStack,
        logs: Path,
        name: str,
        model: str,
        producer: Settings,
        consumer: Settings | None = None,
        alone: Settings | None = None,
    ) -> Trio:
        """All three side by side; they end with `running`. Without settings of its own the consumer has the producer's,
        and the single engine the consumer's."""
        decode = consumer or producer
        specs = (
            producer.spec(f"{name}-producer", model, "kv_producer"),
            decode.spec(f"{name}-consumer", model, "kv_consumer"),
            (alone or decode).spec(f"{name}-alone", model),
        )
        return Trio(*start(running, logs, specs))

    def worst_difference(self, lengths: Sequence[int], tokens: int = 3) -> float:
        """Hand prompts of these lengths over; by how much log-probabilities differ from the single engine's."""
        worst = 0.0
        for number, length in enumerate(lengths):
            prompt = prompt_of(length, number)
            answer, _ = hand_over(self.producer, self.consumer, prompt, tokens)
            worst = max(
                worst, difference(answer, self.alone.answer(prompt, tokens=tokens))
            )
        return worst

    def worst_continuation(self, lengths: Sequence[int], tokens: int = 3) -> float:
        """The same of prompts that end with a token which the single engine has decoded, not prefilled: in 16 bits
        both give other numbers, and a consumer decodes a prompt's last token."""
        worst = 0.0
        for number, length in enumerate(lengths):
            prompt = prompt_of(length, number)
            said = self.alone.answer(prompt, tokens=tokens + 1)
            rest = Answer(said.tokens[1:], said.logprobs[1:], None)
            answer, _ = hand_over(
                self.producer, self.consumer, [*prompt, said.tokens[0]], tokens
            )
            worst = max(worst, difference(answer, rest))
        return worst


def is_mapped(consumer: ForkedEngine) -> bool:
    """Whether this engine has mapped the cache of the producer that it is connected to, by its log."""
    log = consumer.log_path.read_text()
    line = [line for line in log.splitlines() if " connected in " in line][-1]
    return " mapped, " in line and "not mapped" not in line


def graph_replays(engine: ForkedEngine) -> int:
    """CUDA graphs that the engine's worker has replayed."""
    (count,) = engine.on_workers(_replays)
    return int(count)


def _replays(_worker: Any) -> int:
    from tests.gpu_emulation.emulation import graphs

    return graphs.replays
