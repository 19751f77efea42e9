"""Benchmark cases: pairs of engines, a request, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bench.llama import BLOCK_TOKENS, llama
from kvferry.plan.blocks import RequestBlocks
from kvferry.protocol.handshake import EngineDescription

REQUEST_TOKENS = 8192

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Case:
    """One pair of engines."""

    producer_tp: int
    consumer_tp: int
    layout: str
    blocks: int

    def __str__(self) -> str:
        return f"{self.layout} TP {self.producer_tp} → TP {self.consumer_tp}"

    @property
    def readers(self) -> int:
        """Producer ranks that one consumer worker reads."""
        return max(1, self.producer_tp // self.consumer_tp)

    def engines(
        self, here: int | None = None, there: Sequence[int] = ()
    ) -> tuple[EngineDescription, EngineDescription]:
        """Consumer and producer; `here` and `there` are where the caches of their first workers are."""
        local = {0: here} if here is not None else None
        consumer = llama("D", tp=self.consumer_tp, layout=self.layout, blocks=self.blocks, bases=local)
        remote = dict(enumerate(there))
        return consumer, llama("P", tp=self.producer_tp, layout=self.layout, blocks=self.blocks, bases=remote)


def best_of(repeats: int, what: Callable[[], _Result]) -> tuple[list[float], _Result]:
    """Processor seconds of every repetition, ascending, and the last result."""
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        result = what()
        seconds.append(time.thread_time() - start)
    return sorted(seconds), result


def request_of(blocks: int, seed: int) -> RequestBlocks:
    """A request of `REQUEST_TOKENS` tokens, its blocks all over both caches."""
    draw = np.random.default_rng(seed)
    count = min(REQUEST_TOKENS // BLOCK_TOKENS, blocks - 1)
    local, remote = (draw.permutation(np.arange(1, blocks))[:count].tolist() for _ in range(2))
    tokens = count * BLOCK_TOKENS
    return RequestBlocks([local], [remote], 0, tokens, tokens)
