"""Engines on the emulated GPU, and what a handover between two of them must show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.accuracy.model import default_cache_dir
from tests.vllm.forked_engine import ForkedEngine, hand_over, start
from tests.vllm.forked_engine_child import Answer, EngineSpec
from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY, small_model

NOISE = 1e-3
"""Log-probabilities in float32 differ by less when the same is computed in another order."""

_ENGINE_ARGS: Mapping[str, Any] = {
    "max_model_len": 256,
    # The interpreter takes seconds for what a GPU does in microseconds: small steps, and none but a few tokens.
    "max_num_batched_tokens": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 16 << 20,
    "attention_config": {"backend": "TRITON_ATTN"},
}


@dataclass(frozen=True)
class Settings:
    """How an engine is started.

    Attributes:
        block_size: tokens.
        layout: NHD or HND.
        engine_args: more of vLLM's `EngineArgs`.
    """

    block_size: int = 16
    layout: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, name: str, model: str, role: str = "") -> EngineSpec:
        """The engine of this name."""
        return EngineSpec(
            name,
            str(small_model(model, default_cache_dir())),
            role,
            block_size=self.block_size,
            engine_args={**_ENGINE_ARGS, **self.engine_args},
            environment={"VLLM_KV_CACHE_LAYOUT": self.layout} if self.layout else {},
        )


def prompt_of(length: int, number: int = 0) -> list[int]:
    """A prompt, another one for every number."""
    span = VOCABULARY - FIRST_TOKEN
    return [FIRST_TOKEN + (7 * at * at + 11 * at + 131 * number) % span for at in range(length)]


def difference(one: Answer, other: Answer) -> float:
    """The largest of their log-probabilities; infinite when the tokens differ."""
    if one.tokens != other.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


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
        consumer: Settings,
    ) -> Trio:
        """All three side by side; they end with `running`."""
        specs = (
            producer.spec(f"{name}-producer", model, "kv_producer"),
            consumer.spec(f"{name}-consumer", model, "kv_consumer"),
            consumer.spec(f"{name}-alone", model),
        )
        return Trio(*start(running, logs, specs))

    def worst_difference(self, lengths: tuple[int, ...], tokens: int = 3) -> float:
        """Hand prompts of these lengths over; by how much log-probabilities differ from the single engine's."""
        worst = 0.0
        for number, length in enumerate(lengths):
            prompt = prompt_of(length, number)
            answer, _ = hand_over(self.producer, self.consumer, prompt)
            worst = max(
                worst, difference(answer, self.alone.answer(prompt, tokens=len(answer.tokens)))
            )
        return worst
