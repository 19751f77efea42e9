"""First contacts between engines with thousands of blocks in 30 layers: a tiny model, so that they fit anywhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.serve_figures import ContactFigures
from bench.serve_load import NO_LOGPROBS, Tick, hand_over, make_cases, run_all, through
from bench.serve_measure import Ask, make_contact
from bench.serve_setups import PAGES, Setup, start_all
from scripts.accuracy.client import Client
from scripts.accuracy.engines import Engine, EngineSpec, Transfer
from scripts.small_models import FIRST_TOKEN, VOCABULARY, default_cache_dir, small_model

MODEL = "small-deep"
BLOCKS = 5500
_WORDS = range(FIRST_TOKEN, VOCABULARY)
_TOKENS = (256, 256, 300)
_TIMEOUT_S = 60.0
QUIET_S = 2.5
"""Before each first contact: vLLM's processes poll for a second after every message, and engines share a core."""
_SAID = re.compile(r"handshake|peer=|remote agent|transfer plan", re.IGNORECASE)
_MOST_LINES = 8


def contact_specs(setup: Setup, model: str, consumers: int) -> list[EngineSpec]:
    """One producer and several consumers, which share a core: only one of them is asked at a time."""

    def spec(name: str, core: str, role: str) -> EngineSpec:
        return EngineSpec(
            f"contact-{setup.name}-{name}",
            model,
            devices=(core,),
            block_size=32,
            max_model_len=1024,
            cache_gib=2.0,
            transfer=Transfer(role, setup.module),
            extra_env=PAGES,
            extra_args=("--skip-tokenizer-init", "--num-gpu-blocks-override", str(BLOCKS)),
        )

    return [spec("producer", "0", "kv_producer")] + [
        spec(f"consumer-{number}", "1", "kv_consumer") for number in range(consumers)
    ]


async def measure_contacts(
    figures: ContactFigures, consumers: int, logs: Path, tell: Callable[[str], None], tick: Tick
) -> None:
    """Start the engines, warm up each by itself, then let each consumer make its first contact."""
    model = str(small_model(MODEL, default_cache_dir()))
    figures.blocks = BLOCKS
    figures.layers = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    with ExitStack() as stack:
        tell("start")
        producer, *others = start_all(stack, contact_specs(figures.setup, model, consumers), logs)
        async with Client("model", _TIMEOUT_S, always=NO_LOGPROBS) as client:
            tell("warm-up")
            for engine in (producer, *others):
                alone: Ask = partial(through, client, engine.base_url, _TIMEOUT_S)
                warm = make_cases(f"warm {engine.spec.name}", _TOKENS, _WORDS)
                if bad := [one.error for one in await run_all(alone, warm, 1, tick) if one.error]:
                    raise RuntimeError(f"{engine.spec.name}: {bad[0]}")
            tell("first contacts")
            for consumer in others:
                await asyncio.sleep(QUIET_S)
                before = consumer.log_path.stat().st_size
                deliver: Ask = partial(hand_over, client, producer.base_url, consumer.base_url, _TIMEOUT_S)
                figures.contacts.append(await make_contact(deliver, _WORDS, name=consumer.spec.name))
                figures.said = figures.said or _said(consumer, before)


def _said(engine: Engine, offset: int) -> list[str]:
    """Log lines about handshakes since `offset`."""
    with engine.log_path.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    return [line[:300] for line in lines if _SAID.search(line)][:_MOST_LINES]
