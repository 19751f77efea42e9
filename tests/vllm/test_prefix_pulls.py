"""The first part of a prompt, read from the engine that has it in its cache: real engines, as routers name them.

The control is the engine that asks, with the same prompt under a `cache_salt` of its own: neither its cache nor any
other engine's has a block of that. What the source's own prefix cache hits for the prompt bounds what may be read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.protocol.digests import CHUNK_TOKENS
from scripts.accuracy.client import ASK_FOR_PREFILL
from scripts.accuracy.metrics import Scrape
from tests.vllm.forked_engine import ForkedEngine, difference, start
from tests.vllm.forked_engine_child import EngineSpec
from tests.vllm.model_kinds import EXACT, LLAMA, Kind
from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY
from tests.vllm.test_model_kinds import NOISE
from tests.waiting import wait_until

_rng = random.Random(35)
KINDS = {kind.model: kind for kind in EXACT}
WINDOWED = KINDS["small-windowed"]
MAMBA = KINDS["small-mamba2-hybrid"]
PREFIX_TOKENS = 600
"""What the source has computed: two whole chunks, and a part of one that is not read."""
NUM_BLOCKS = 64
"""A source lends a quarter of its blocks at most, those of all groups together."""
ASKS = {"allowed_hosts": ["127.0.0.1"], "prefix_pull_min_tokens": 1}


def tokens(count: int) -> list[int]:
    """A text that no other one begins with."""
    return [_rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def spec(
    kind: Kind, name: str, block_size: int | None = None, tp: int = 1, **args: Any
) -> EngineSpec:
    """An engine that asks others for prefixes, and answers them."""
    settings = {
        "max_model_len": 1024,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": NUM_BLOCKS * (128 // (block_size or 128)),
        **args,
    }
    started = kind.spec(f"prefix-{name}", tp, **settings)
    return replace(started, block_size=block_size, extra_config=ASKS)


def named(source: ForkedEngine) -> dict[str, Any]:
    """As llm-d's sidecar names the engine of its header."""
    address = {
        "kv_request_id": "any",
        "remote_host": "127.0.0.1",
        "remote_port": source.port,
    }
    return {"remote_kv_source": address}


@dataclass(frozen=True)
class Pulled:
    """What an engine has counted while it served a request.

    Attributes:
        loaded: tokens of a prefix that it has read.
        external: prompt tokens that vLLM has not computed since the connector had them.
        refused: prefixes that were not read, by reason.
    """

    loaded: int
    external: int
    refused: Mapping[str, float]

    @classmethod
    def of(cls, counted: Scrape) -> Pulled:
        return cls(
            int(counted.total("vllm:kvferry_prefix_tokens_loaded_total")),
            int(counted.total("vllm:external_prefix_cache_hits_total")),
            counted.by_label("vllm:kvferry_prefixes_not_pulled_total", "reason"),
        )


def pull(
    source: ForkedEngine, asker: ForkedEngine, prompt: list[int], more_tokens: int = 8
) -> Pulled:
    """A prompt whose first part the source has is answered as the asker does alone. Returns what was read."""
    expected = asker.answer(prompt, tokens=more_tokens, salt="control")
    free = source.free_blocks()
    before = asker.metrics()
    found = asker.answer(prompt, named(source), more_tokens)
    counted = asker.metrics() - before
    assert difference(found, expected) < NOISE
    assert counted.by_label("vllm:kvferry_local_recomputes_total", "reason") == {}
    wait_until(
        lambda: source.free_blocks() == free,
        "the source has its blocks back",
        timeout_s=60,
    )
    return Pulled.of(counted)


def own_hit(source: ForkedEngine, prompt: list[int]) -> int:
    """Tokens of a prompt that the engine's own prefix cache has for it."""
    before = source.metrics()
    source.answer(prompt)
    return int((source.metrics() - before).total("vllm:prefix_cache_hits_total"))


def read_of(
    source: ForkedEngine, asker: ForkedEngine, prompt: list[int]
) -> tuple[Pulled, int]:
    """What was read of a prompt of which the source has computed a part, and what its own cache has of it."""
    source.answer(prompt[:PREFIX_TOKENS])
    return pull(source, asker, prompt), own_hit(source, prompt)


@pytest.fixture(scope="module")
def llamas(logs: Path) -> Iterator[dict[str, ForkedEngine]]:
    """By name engines of one model: equal ones, one of short blocks, one of two ranks."""
    specs = {
        "one": spec(LLAMA, "one", 128),
        "twin": spec(LLAMA, "twin", 128),
        "short": spec(LLAMA, "short", 32),
        "two": spec(LLAMA, "two", 128, tp=2),
    }
    with ExitStack() as running:
        yield dict(zip(specs, start(running, logs, specs.values()), strict=True))


@pytest.mark.parametrize(
    ("source", "asker"),
    [("one", "twin"), ("short", "one"), ("one", "short"), ("two", "one")],
    ids=["equal", "blocks 32 to 128", "blocks 128 to 32", "tp 2 to 1"],
)
def test_what_another_engine_has_is_read_and_not_computed(
    llamas: dict[str, ForkedEngine], source: str, asker: str
) -> None:
    prompt = tokens(PREFIX_TOKENS + 40)
    pulled, hit = read_of(llamas[source], llamas[asker], prompt)
    chunks = hit // CHUNK_TOKENS * CHUNK_TOKENS
    assert chunks == 2 * CHUNK_TOKENS
    assert pulled == Pulled(loaded=chunks, external=chunks, refused={})
    # The order of a request's blocks does not change its attention. So each block is used without those after it.
    shorter = [*prompt[:CHUNK_TOKENS], *tokens(40)]
    assert own_hit(llamas[asker], shorter) == CHUNK_TOKENS
    expected = llamas[asker].answer(shorter, salt="another control")
    assert difference(llamas[asker].answer(shorter), expected) < NOISE


def test_a_turn_is_prefilled_from_the_decoder_that_has_the_ones_before(
    llamas: dict[str, ForkedEngine],
) -> None:
    """Its generated answer, too; and the decoder reads of the prefiller only what it lacks."""
    decoder = llamas["one"]
    prefiller = llamas["twin"]
    said = tokens(300)
    answer = decoder.ask(said, tokens=250)
    text = [*said, *answer, *tokens(40)]
    expected = decoder.answer(text, salt="control")
    held = len(said) + len(answer) - 1
    free = [engine.free_blocks() for engine in (decoder, prefiller)]
    before = [engine.metrics() for engine in (decoder, prefiller)]
    leg = {**ASK_FOR_PREFILL, **named(decoder)}
    prefilled = prefiller.answer(text, leg, 1)
    assert prefilled.params
    found = decoder.answer(text, prefilled.params)
    by_decoder, by_prefiller = (
        engine.metrics() - earlier
        for engine, earlier in zip((decoder, prefiller), before, strict=True)
    )
    assert difference(found, expected) < NOISE
    chunks = held // CHUNK_TOKENS * CHUNK_TOKENS
    assert chunks > len(said), "a part of the answer is read"
    assert Pulled.of(by_prefiller) == Pulled(chunks, chunks, {})
    blocks = held // 128 * 128
    assert by_decoder.total("vllm:prefix_cache_hits_total") == blocks
    assert Pulled.of(by_decoder) == Pulled(0, len(text) - blocks, {})
    wait_until(
        lambda: [engine.free_blocks() for engine in (decoder, prefiller)] == free,
        "both have their blocks back",
        timeout_s=60,
    )


@pytest.mark.parametrize("kind", [WINDOWED, MAMBA], ids=lambda kind: kind.model)
def test_of_a_hybrid_what_the_source_would_hit_is_read(kind: Kind, logs: Path) -> None:
    with ExitStack() as running:
        one, twin = start(running, logs, [spec(kind, name) for name in ("one", "twin")])
        pulled, hit = read_of(one, twin, tokens(PREFIX_TOKENS + 40))
    chunks = hit // CHUNK_TOKENS * CHUNK_TOKENS
    assert chunks == 2 * CHUNK_TOKENS
    assert pulled == Pulled(loaded=chunks, external=chunks, refused={})
