"""First contacts between real vLLM engines of 5,500 blocks and 30 layers: kvferry beside vLLM's NixlConnector.

    python -m bench.engine_contact            # about 10 minutes on two cores
    python -m bench.engine_contact --quick    # one pair each, 3 minutes

The model is tiny, so that thousands of blocks fit anywhere. One producer and three consumers at a time, each contacting
it once; the connectors take turns. It writes `results/engine_contact.json`. Ctrl-C ends all servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.command import quick_or_whole
from bench.figures import Cell, Results, Table, Target, spread
from bench.serve_figures import median
from bench.serve_load import NO_LOGPROBS, Ask, hand_over, make_cases, run_all, through
from bench.serve_setups import CALM, KVFERRY, Setup, short, start_all
from scripts.accuracy.client import Client
from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.accuracy.model import default_cache_dir
from scripts.accuracy.settings import ROOT
from tests.vllm.small_models import FIRST_TOKEN, VOCABULARY, small_model

MODEL, LAYERS, BLOCKS = "small-deep", 30, 5500
LIMIT = 0.25
QUIET_S = 2.5
"""Before each first contact: vLLM's processes poll for a second after every message, and engines share a core."""
_WORDS = range(FIRST_TOKEN, VOCABULARY)
_WARM_TOKENS = (256, 256, 300)
_CONTACT_TOKENS = (256,) * 6
"""Of the first handover, and of those that follow."""
_TIMEOUT_S = 60.0
_ROUNDS = 2
_CONSUMERS = 3
WHAT = (
    "What the first handover between two vLLM engines takes longer than those that follow. Engines of 5,500 blocks and "
    "30 layers of a tiny model, one core for each; the client sends both requests as a router does. Every engine has "
    "answered before, by itself, and none is busy."
)


@dataclass(frozen=True, slots=True)
class Contact:
    """Handovers between two engines without an earlier contact; the first one beside those that follow."""

    first_s: float
    warm_s: tuple[float, ...]

    @property
    def extra_s(self) -> float:
        """Time of the first, less the median of the others."""
        return self.first_s - median(self.warm_s)


@dataclass(slots=True)
class ContactFigures:
    """First contacts of one connector, one for each consumer."""

    setup: Setup
    contacts: list[Contact] = field(default_factory=list)
    error: str = ""

    @property
    def extra_s(self) -> float:
        """The median of all."""
        return median(one.extra_s for one in self.contacts)


def contact_specs(setup: Setup, model: str, consumers: int) -> list[EngineSpec]:
    """One producer and several consumers, which share a core: only one of them is asked at a time."""

    def spec(name: str, core: str, role: str) -> EngineSpec:
        return EngineSpec(
            f"contact-{setup.name}-{name}",
            model,
            devices=(core,),
            block_size=32,
            max_model_len=1024,
            cache_gib=2,
            transfer=Transfer(role, setup.module),
            extra_args=(
                "--skip-tokenizer-init",
                "--num-gpu-blocks-override",
                str(BLOCKS),
            ),
        )

    return [spec("producer", "0", "kv_producer")] + [
        spec(f"consumer-{number}", "1", "kv_consumer") for number in range(consumers)
    ]


async def measure_contacts(figures: ContactFigures, consumers: int, logs: Path) -> None:
    """Start the engines, warm up each by itself, then let each consumer make its first contact."""
    model = str(small_model(MODEL, default_cache_dir()))
    with ExitStack() as stack:
        producer, *others = start_all(
            stack, contact_specs(figures.setup, model, consumers), logs
        )
        async with Client("model", _TIMEOUT_S, always=NO_LOGPROBS) as client:
            for engine in (producer, *others):
                alone: Ask = partial(through, client, engine.base_url, _TIMEOUT_S)
                warm = make_cases(f"warm {engine.spec.name}", _WARM_TOKENS, _WORDS)
                if bad := [
                    one.error for one in await run_all(alone, warm, 1) if one.error
                ]:
                    raise RuntimeError(f"{engine.spec.name}: {bad[0]}")
            for consumer in others:
                await asyncio.sleep(QUIET_S)
                deliver: Ask = partial(
                    hand_over, client, producer.base_url, consumer.base_url, _TIMEOUT_S
                )
                # Other prompts for every consumer: the producer has the former ones in its cache.
                cases = make_cases(consumer.spec.name, _CONTACT_TOKENS, _WORDS)
                first, *following = [await deliver(case) for case in cases]
                if first.error:
                    raise RuntimeError(
                        f"the first handover to {consumer.spec.name} failed: {first.error}"
                    )
                warm_s = tuple(one.handover_s for one in following if not one.error)
                figures.contacts.append(Contact(first.handover_s, warm_s))


def run(logs: Path, *, quick: bool) -> Results:
    """Measure everything."""
    rounds, consumers = (1, 1) if quick else (_ROUNDS, _CONSUMERS)
    found = {setup.name: ContactFigures(setup) for setup in (KVFERRY, CALM)}
    for number in range(rounds):
        for figures in found.values():
            print(f"{figures.setup.title}, {number + 1} of {rounds}", flush=True)
            try:
                asyncio.run(measure_contacts(figures, consumers, logs / str(number)))
            except Exception as error:  # noqa: BLE001 - only its own figures are lost; the notes say why
                figures.error = short(error)
    return results_of(found, quick=quick)


def results_of(found: Mapping[str, ContactFigures], *, quick: bool) -> Results:
    """A connector a row, by the setup's name."""
    rows: list[Sequence[Cell]] = []
    for many in found.values():
        extra = [1e3 * contact.extra_s for contact in many.contacts]
        first = 1e3 * median(contact.first_s for contact in many.contacts)
        warm = 1e3 * median(
            warm_s for contact in many.contacts for warm_s in contact.warm_s
        )
        rows.append(
            [
                many.setup.title,
                len(extra),
                first,
                warm,
                1e3 * many.extra_s,
                spread(extra),
            ]
        )
    ours, peer = found[KVFERRY.name], found[CALM.name]
    columns = (
        "",
        "pairs",
        "first handover",
        "warm handover",
        "extra",
        "range of extra",
    )
    return Results(
        command="python -m bench.engine_contact" + " --quick" * quick,
        what=WHAT,
        tables=(Table("First contact between engines: ms, medians", columns, rows),),
        targets=(
            Target.at_most(
                f"first contact, {BLOCKS:,} blocks × {LAYERS} layers",
                1e3 * ours.extra_s,
                1e3 * LIMIT * peer.extra_s,
                "ms",
                "a quarter of the event-driven peer's; beyond a warm handover",
            ),
        ),
        notes=(
            "The producer has a core, the consumers share the other one; one of them is asked at a time. Before each "
            f"first contact the engines are left alone for {QUIET_S:g} s: vLLM's processes poll for a second after "
            "every message, and those of another consumer would take the core.",
            "The peer as shipped is left out: its four workers would spin on two cores.",
            *(
                f"{many.setup.title} ended early: {many.error}"
                for many in found.values()
                if many.error
            ),
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    return quick_or_whole(
        "engine_contact",
        __doc__,
        "one pair of engines for each connector",
        lambda quick: run(ROOT / "logs" / "engine_contact", quick=quick),
    )


if __name__ == "__main__":
    raise SystemExit(main())
