"""The demonstration's second prompt: its beginning is in another engine's cache, and is read from there.

A busy machine may answer too late; then the prompt is computed, as in every fleet, and the demonstration says why and
goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from scripts.accuracy.client import Answer, Client
from scripts.accuracy.metrics import Scrape
from scripts.accuracy.prompts import Case

OPTIONS: Mapping[str, Any] = {
    # A request that names an engine can be written by any client, so even this host must be listed.
    "allowed_hosts": ["127.0.0.1"],
    # Here the model is small and both engines share a core or two: the estimate could prefer to compute.
    "prefix_pull_min_tokens": 256,
}
"""What engines need, so that one of them reads a prefix from another."""

PREFIX_TOKENS = 1024
SUFFIX_TOKENS = 32
_ANSWER_TOKENS = 8
ATTEMPTS = 3
"""Prompts that are tried: a wait ends after a second, and a machine may have been busy for that long."""
COUNTED_S = 2.0
"""Most time until an engine has counted what became of a prompt: a moment after its first token."""
_LOOK_S = 0.1

_LOADED = "vllm:kvferry_prefix_tokens_loaded_total"
_NOT_PULLED = "vllm:kvferry_prefixes_not_pulled_total"


class Asked(Protocol):
    """An engine that is asked: `scripts.accuracy.engines.Engine`."""

    base_url: str
    side_channel_port: int

    def metrics(self) -> Scrape:
        """Its counters now."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A prompt that names another engine, and what the engine that answered it has counted.

    Attributes:
        answer: with the time to its first token.
        tokens: that were read from the other engine; 0 if it was computed.
        num_bytes: read for them.
        load_s: from the order until they were there.
        reasons: why none were read, as the metric has it; empty if it asked nobody.
    """

    answer: Answer
    tokens: int = 0
    num_bytes: int = 0
    load_s: float = 0.0
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Answer, counted: Scrape) -> Pulled:
        """From what was counted meanwhile."""
        loads = counted.total("vllm:kvferry_peer_loads_total")
        seconds = counted.total("vllm:kvferry_peer_load_seconds_total")
        return cls(
            answer,
            int(counted.total(_LOADED)),
            int(counted.total("vllm:kvferry_peer_bytes_total")),
            seconds / max(1.0, loads),
            tuple(counted.by_label(_NOT_PULLED, "reason")),
        )


@dataclass(slots=True)
class SecondPrompt:
    """A prompt whose beginning `source` has in its cache, at `engine`; `client` asks both."""

    client: Client
    source: Asked
    engine: Asked
    _chooser: random.Random = field(default_factory=lambda: random.Random("prefix"))

    async def compute(self) -> Answer:
        """A prompt as long that no engine knows. It also tells the engine how long it may wait for answers."""
        case = self._after(self._tokens(PREFIX_TOKENS))
        return await self.client.ask(self.engine.base_url, case)

    async def pull(self) -> Pulled:
        """The last of a few attempts: the first that is read from the source, or one that another would not change."""
        for _ in range(ATTEMPTS):
            pulled = await self._pull()
            may_have_been_late = pulled.reasons and not pulled.tokens
            if pulled.answer.error or not may_have_been_late:
                break
        return pulled

    async def _pull(self) -> Pulled:
        prefix = self._tokens(PREFIX_TOKENS)
        answer = await self.client.ask(self.source.base_url, self._after(prefix))
        if answer.error:
            return Pulled(answer)
        named = {
            "kv_request_id": "demo",
            "remote_host": "127.0.0.1",
            "remote_port": self.source.side_channel_port,
        }
        before = self.engine.metrics()
        answer = await self.client.ask(
            self.engine.base_url,
            self._after(prefix),
            kv_transfer_params={"remote_kv_source": named},
        )
        for _ in range(max(1, round(COUNTED_S / _LOOK_S))):
            pulled = Pulled.of(answer, self.engine.metrics() - before)
            if pulled.tokens or pulled.reasons or answer.error:
                break
            await asyncio.sleep(_LOOK_S)
        return pulled

    def _after(self, prefix: tuple[int, ...]) -> Case:
        """A prompt that begins so."""
        prompt = prefix + self._tokens(SUFFIX_TOKENS)
        return Case("demo-prefix", prompt, max_tokens=_ANSWER_TOKENS, stream=True)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._chooser.choices(range(100, 40_000), k=count))


def lines_of(computed: Answer, pulled: Pulled, source: str, engine: str) -> list[str]:
    """Both prompts, for a terminal.

    Args:
        source, engine: names of the engine that has the beginning, and of the one that was asked.
    """
    first_line = (
        f"A prompt of {PREFIX_TOKENS:,} + {SUFFIX_TOKENS} tokens at {engine}; "
        f"{source} has the first {PREFIX_TOKENS:,} in its cache:"
    )
    read = f"{_first_token(pulled.answer)}: "
    if pulled.tokens:
        read += (
            f"{pulled.tokens:,} tokens, {pulled.num_bytes / 1e6:.1f} MB "
            f"in {1e3 * pulled.load_s:.1f} ms, from {source}"
        )
        name = "read"
    else:
        why = ", ".join(pulled.reasons) or "no engine was asked"
        read += f"not read from {source} ({why})"
        name = "computed"
    return [first_line, _line("computed", _first_token(computed)), _line(name, read)]


def _line(name: str, text: str) -> str:
    return f"  {name:<10}{text}"


def _first_token(answer: Answer) -> str:
    if answer.error or answer.first_token_s is None:
        return f"failed: {answer.error or 'no token'}"
    return f"first token after {1e3 * answer.first_token_s:,.0f} ms"
