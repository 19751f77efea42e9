"""The table of pairs in docs/compatibility.md: every row is a pair of engines that the planner has judged just now.

A side is a short form, as `kvferry plan` takes it: the model's and what the side adds. What a short form cannot say is
a change to the description that it stands for, named in the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.cli.plan.sides import read_pair
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription

Change = Callable[[EngineDescription], EngineDescription]

MODELS = {
    "GQA": "layers=4,heads=8,dim=128",
    "5 heads": "layers=4,heads=5,dim=128",
    "2 heads": "layers=4,heads=2,dim=128",
    "MLA": "layers=4,mla=576",
    "windowed": "layers=6,heads=8,dim=128,window=1024@0-4",
    "Mamba-2 hybrid": "layers=4,heads=8,dim=128,state_layers=0-2,ssm=24x64x128,conv=x1536+B128+C128",
    "Mamba-1": "layers=4,state_layers=*,ssm=1536x16,conv=x1536",
    "gated delta net": "layers=4,heads=2,dim=128,state_layers=0-2,ssm=16x128x128,conv=q1024+k1024+v2048",
}
"""Short forms of the models; rows add what the two sides have of their own."""


@dataclass(frozen=True)
class Pair:
    """One row.

    Attributes:
        what: what the row shows.
        model: one of `MODELS`.
        producer, consumer: what either side adds to the model's short form.
        words: what is changed beyond that.
        change: changes the producer.
        both: changes the consumer as well.
    """

    what: str
    model: str
    producer: str
    consumer: str
    words: str = ""
    change: Change | None = None
    both: bool = False


def each_tensor(change: Callable[[PagedTensor], PagedTensor]) -> Change:
    """Change every tensor of every worker."""

    def apply(engine: EngineDescription) -> EngineDescription:
        workers = [
            msgspec.structs.replace(worker, tensors=tuple(change(tensor) for tensor in worker.tensors))
            for worker in engine.workers
        ]
        return msgspec.structs.replace(engine, workers=tuple(workers))

    return apply


def formatted(**changed: Any) -> Change:
    """Change every tensor's format."""
    return each_tensor(
        lambda tensor: msgspec.structs.replace(tensor, format=msgspec.structs.replace(tensor.format, **changed))
    )


def facts(**changed: Any) -> Change:
    """Change what is said about the model."""
    return lambda engine: msgspec.structs.replace(engine, facts=msgspec.structs.replace(engine.facts, **changed))


def opaque(engine: EngineDescription) -> EngineDescription:
    """An opaque cache: K and V of all heads of a worker are one cell of a whole block."""

    def whole(tensor: PagedTensor) -> PagedTensor:
        return msgspec.structs.replace(
            tensor,
            kind="kv",
            heads=Range(tensor.heads.start // len(tensor.heads), tensor.heads.start // len(tensor.heads) + 1),
            head_stride=tensor.block_stride,
            tile_tokens=tensor.block_tokens,
            tile_stride=tensor.block_stride,
            cell_bytes=tensor.block_stride,
            format=Format(dtype="uint8", quantization="nvfp4", packing=f"nvfp4/tp{engine.topology.tp}"),
        )

    workers = [
        msgspec.structs.replace(worker, tensors=tuple(whole(tensor) for tensor in worker.tensors if tensor.kind == "k"))
        for worker in engine.workers
    ]
    return msgspec.structs.replace(engine, workers=tuple(workers))


def without_worker(index: int) -> Change:
    """One worker has not described itself."""
    return lambda engine: msgspec.structs.replace(engine, workers=engine.workers[:index] + engine.workers[index + 1 :])


_OPAQUE = "a packing that is not known, e.g. NVFP4"

PAIRS = (
    Pair("equal engines", "GQA", "tp=2", "tp=2"),
    Pair("more producer ranks", "GQA", "tp=8", "tp=4"),
    Pair("more consumer ranks", "GQA", "tp=4", "tp=8"),
    Pair("ranks that do not divide", "GQA", "tp=2", "tp=3"),
    Pair("ranks that do not divide", "GQA", "tp=6", "tp=4"),
    Pair("heads that do not divide", "5 heads", "tp=2", "tp=3"),
    Pair("more ranks than heads on both sides", "2 heads", "tp=8", "tp=4"),
    Pair("more ranks than heads on the producer", "2 heads", "tp=4", "tp=1"),
    Pair("more ranks than heads on the consumer", "2 heads", "tp=2", "tp=8"),
    Pair("pipeline stages on the producer", "GQA", "pp=4", "pp=1"),
    Pair("pipeline stages on the consumer", "GQA", "pp=1", "pp=2"),
    Pair("uneven stages and other ranks", "GQA", "stages=1+3,tp=2", "stages=2+2,tp=4"),
    Pair("MLA, more producer ranks", "MLA", "tp=4", "tp=2"),
    Pair("MLA, more consumer ranks", "MLA", "tp=1", "tp=4"),
    Pair("decode context parallelism", "MLA", "tp=4,dcp=4", "tp=2,dcp=2"),
    Pair("decode context parallelism on the producer", "MLA", "tp=4,dcp=4", "tp=1"),
    Pair("decode context parallelism on the consumer", "MLA", "tp=1", "tp=2,dcp=2"),
    Pair("decode context parallelism with heads", "GQA", "tp=4,dcp=2", "tp=4,dcp=4"),
    Pair("other interleaves, sizes that do not divide", "MLA", "tp=2,dcp=2,interleave=1", "tp=3,dcp=3,interleave=16"),
    Pair("prefill context parallelism on the producer", "GQA", "pcp=2,tp=2", "tp=2"),
    Pair("prefill context parallelism on the consumer", "GQA", "tp=2", "pcp=2,tp=2"),
    Pair("smaller blocks on the producer", "GQA", "block=16", "block=64"),
    Pair("larger blocks on the producer", "GQA", "block=64", "block=16"),
    Pair("blocks that do not divide", "GQA", "block=16", "block=24"),
    Pair("kernel blocks smaller than scheduler blocks", "GQA", "block=128,kernel_block=16", "block=64"),
    Pair("other blocks and other ranks", "GQA", "block=16,tp=4", "block=64,tp=2"),
    Pair("heads outermost to tokens outermost", "GQA", "layout=HND", "layout=NHD"),
    Pair("tokens outermost to heads outermost", "GQA", "layout=NHD,tp=2", "layout=HND,tp=4"),
    Pair("tokens outermost on both sides, other ranks", "GQA", "layout=NHD,tp=4", "layout=NHD,tp=2"),
    Pair("all layers of a block together, and apart", "GQA", "layout=BLHNC", "layout=LBHNC"),
    Pair("heads outside of layers, and of blocks", "GQA", "layout=BHLNC", "layout=LHBNC"),
    Pair("K and V packed, and apart", "GQA", "kv=packed", "kv=apart"),
    Pair("CPU attention, equal blocks", "GQA", "layout=CPU,block=32", "layout=CPU,block=32"),
    Pair("CPU attention, other blocks", "GQA", "layout=CPU,block=32", "layout=CPU,block=128"),
    Pair("CPU attention to another layout", "GQA", "layout=CPU,block=32", "layout=HND,block=16"),
    Pair("a sliding window beside full attention", "windowed", "tp=2", "tp=1,block=32"),
    Pair("recurrent states, more producer ranks", "Mamba-2 hybrid", "tp=4", "tp=2"),
    Pair("recurrent states, more consumer ranks", "Mamba-2 hybrid", "tp=2", "tp=4"),
    Pair("recurrent states, ranks that do not divide", "Mamba-1", "tp=2", "tp=3"),
    Pair("recurrent states, other attention blocks", "Mamba-2 hybrid", "block=256", "block=384"),
    Pair("a convolution state in both layouts", "Mamba-2 hybrid", "conv_layout=DS", "conv_layout=SD"),
    Pair("a gated delta net", "gated delta net", "tp=4", "tp=2"),
    Pair("cache types of one size", "GQA", "dtype=bfloat16", "dtype=float16"),
    Pair("cache types of two sizes", "GQA", "dtype=bfloat16", "dtype=float8_e4m3"),
    Pair("cache types and layouts that differ", "GQA", "dtype=bfloat16", "dtype=float8_e4m3,layout=NHD,block=64"),
    Pair("states of another type", "Mamba-2 hybrid", "state_dtype=float32", "state_dtype=bfloat16"),
    Pair(
        "scales that change from token to token",
        "GQA",
        "dtype=float8_e4m3",
        "dtype=float8_e4m3",
        "the producer's scales are per token",
        formatted(quantization="fp8_per_token_head"),
    ),
    Pair("opaque blocks, equal engines", "GQA", "tp=2", "tp=2", _OPAQUE, opaque, both=True),
    Pair("opaque blocks of two sizes", "GQA", "block=16", "block=32", _OPAQUE, opaque, both=True),
    Pair("opaque blocks, other ranks", "GQA", "tp=2", "tp=1", _OPAQUE, opaque, both=True),
    Pair(
        "packings of two instruction sets",
        "GQA",
        "layout=CPU,block=32",
        "layout=CPU,block=32",
        "the producer's cache is packed for AMX",
        formatted(packing="cpu_attn/amx"),
    ),
    Pair("a producer with more layers", "GQA", "layers=6", "layers=4"),
    Pair("a consumer with more layers", "GQA", "layers=4", "layers=6"),
    Pair("windows of two lengths", "windowed", "", "window=512@0-4"),
    Pair("a window on one side only", "GQA", "window=1024", ""),
    Pair("other weights", "GQA", "", "", "another fingerprint", facts(fingerprint="other weights")),
    Pair("another draft method", "GQA", "", "", "the producer drafts with eagle", facts(speculative="eagle")),
    Pair("a worker that is missing", "GQA", "tp=4", "tp=1", "the producer's rank 2 says nothing", without_worker(2)),
)


def table() -> str:
    """The models and the pairs as Markdown."""
    rows = ["| model | short form |", "| --- | --- |", *(f"| {name} | `{form}` |" for name, form in MODELS.items()), ""]
    rows += ["| | model | producer | consumer | the planner's answer |", "| --- | --- | --- | --- | --- |"]
    for pair in PAIRS:
        words = f"; {pair.words}" if pair.words else ""
        sides = f"{_shown(pair.producer)} | {_shown(pair.consumer)}"
        rows.append(f"| {pair.what}{words} | {pair.model} | {sides} | {answer(pair)} |")
    return "\n".join(rows)


def engines(pair: Pair) -> tuple[EngineDescription, EngineDescription]:
    """Producer and consumer."""
    model = MODELS[pair.model]
    producer, consumer = read_pair(joined(model, pair.producer), joined(model, pair.consumer), bytes)
    if pair.change is None:
        return producer, consumer
    return pair.change(producer), pair.change(consumer) if pair.both else consumer


def joined(model: str, more: str) -> str:
    """A model's short form with keys added or replaced."""
    keys = dict(item.split("=", 1) for form in (model, more) if form for item in form.split(","))
    return ",".join(f"{key}={value}" for key, value in keys.items())


def answer(pair: Pair) -> str:
    """The planner's answer for a pair."""
    producer, consumer = engines(pair)
    try:
        plans = plan_engine(consumer, producer)
    except PlanRefused as refused:
        first, *others = refused.reasons
        more = f" (and {_counted(len(others), 'more reason')})" if others else ""
        return f"**refused**: {first}{more}"
    return _reported(plans)


def _reported(plans: tuple[TransferPlan, ...]) -> str:
    routes = [route for plan in plans for route in plan.routes]
    reads = [route for route in routes if route.slices]
    placings = sorted({item.placing.value for route in reads for item in route.slices})
    lengths = sorted({bundle.run_bytes for route in reads for bundle in route.bundles})
    runs = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}…{lengths[-1]}"
    releases = f", {_counted(len(routes) - len(reads), 'release')}" if len(routes) > len(reads) else ""
    return f"**{' and '.join(placings)}**: {_counted(len(reads), 'route')}{releases}, runs of {runs} B"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _shown(form: str) -> str:
    return f"`{form}`" if form else ""
