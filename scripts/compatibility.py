"""The planner's answers for the pairs of engines in docs/compatibility.md.

Models and pairs are written on the page: a model's short form, as `kvferry plan` takes it, and what either side adds to
it. What a short form cannot say follows a row's name after a semicolon; `CHANGES` has it. The last column is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from kvferry.cli.plan.sides import read_pair
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription

Pair = tuple[EngineDescription, EngineDescription]


def with_answers(rows: str) -> str:
    """The tables with the planner's answer in every row of a pair."""
    found = pairs(rows)
    return "\n".join(_row(line, answer(next(found)[1])) if _is_pair(line) else line for line in rows.splitlines())


def pairs(rows: str) -> Iterator[tuple[str, Pair]]:
    """The name of every row and its producer and consumer."""
    models: dict[str, str] = {}
    for line in rows.splitlines():
        cells = _cells(line)
        if len(cells) == 2:
            models[cells[0]] = cells[1]
        elif _is_pair(line):
            what, model, producer, consumer, _ = cells
            pair = read_pair(joined(models[model], producer), joined(models[model], consumer), bytes)
            _, changed, change = what.partition("; ")
            yield what, CHANGES[change](pair) if changed else pair


def joined(model: str, more: str) -> str:
    """A model's short form with keys added or replaced."""
    keys = dict(item.split("=", 1) for form in (model, more) if form for item in form.split(","))
    return ",".join(f"{key}={value}" for key, value in keys.items())


def answer(pair: Pair) -> str:
    """The planner's answer for a producer and a consumer."""
    producer, consumer = pair
    try:
        plans = plan_engine(consumer, producer)
    except PlanRefused as refused:
        first, *others = refused.reasons
        more = f" (and {_counted(len(others), 'more reason')})" if others else ""
        return f"**refused**: {first}{more}"
    routes = [route for plan in plans for route in plan.routes]
    reads = [route for route in routes if route.slices]
    placings = sorted({item.placing.value for route in reads for item in route.slices})
    lengths = sorted({bundle.run_bytes for route in reads for bundle in route.bundles})
    runs = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}…{lengths[-1]}"
    releases = f", {_counted(len(routes) - len(reads), 'release')}" if len(routes) > len(reads) else ""
    return f"**{' and '.join(placings)}**: {_counted(len(reads), 'route')}{releases}, runs of {runs} B"


def _cells(line: str) -> list[str]:
    return [cell.strip("` ") for cell in line[2:-2].split(" | ")] if line.startswith("| ") else []


def _is_pair(line: str) -> bool:
    return len(_cells(line)) == 5 and not line.startswith("| ---")


def _row(line: str, answered: str) -> str:
    return " | ".join([*line.split(" | ")[:4], f"{answered} |"])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _formatted(**changed: Any) -> Callable[[Pair], Pair]:
    def change(pair: Pair) -> Pair:
        workers = [
            replace(
                worker, tensors=tuple(replace(each, format=replace(each.format, **changed)) for each in worker.tensors)
            )
            for worker in pair[0].workers
        ]
        return replace(pair[0], workers=tuple(workers)), pair[1]

    return change


def _facts(**changed: Any) -> Callable[[Pair], Pair]:
    return lambda pair: (replace(pair[0], facts=replace(pair[0].facts, **changed)), pair[1])


def _without_rank_2(pair: Pair) -> Pair:
    workers = pair[0].workers
    return replace(pair[0], workers=workers[:2] + workers[3:]), pair[1]


def _opaque(engine: EngineDescription) -> EngineDescription:
    """K and V of all heads of a worker are one cell of a whole block."""

    def whole(tensor: PagedTensor) -> PagedTensor:
        head = tensor.heads.start // len(tensor.heads)
        return replace(
            tensor,
            kind="kv",
            heads=Range(head, head + 1),
            head_stride=tensor.block_stride,
            tile_tokens=tensor.block_tokens,
            tile_stride=tensor.block_stride,
            cell_bytes=tensor.block_stride,
            format=Format(dtype="uint8", quantization="nvfp4", packing=f"nvfp4/tp{engine.topology.tp}"),
        )

    keys = [replace(w, tensors=tuple(whole(each) for each in w.tensors if each.kind == "k")) for w in engine.workers]
    return replace(engine, workers=tuple(keys))


CHANGES: dict[str, Callable[[Pair], Pair]] = {
    "the producer's scales are per token": _formatted(quantization="fp8_per_token_head"),
    "the producer's cache is packed for AMX": _formatted(packing="cpu_attn/amx"),
    "a packing that is not known, e.g. NVFP4": lambda pair: (_opaque(pair[0]), _opaque(pair[1])),
    "another fingerprint": _facts(fingerprint="other weights"),
    "the producer drafts with eagle": _facts(speculative="eagle"),
    "the producer's rank 2 says nothing": _without_rank_2,
}
