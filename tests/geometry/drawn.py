"""Draws of the property test: a pair with addresses, sometimes with a change that may make it incompatible."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from hypothesis import strategies as st

from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup, EngineDescription, Setting
from tests.geometry.pairs import Pair, engine, pairs
from tests.geometry.requests import Request

_CHANGED = 0.22
_NUMBERS = st.integers(0, 1 << 32)


class Drawn:
    """A pair as two engines. Of a changed one, the producer's description differs from what `pair` says."""

    def __init__(self, pair: Pair, change: str = "", which: int = 0) -> None:
        self.pair, self.change = pair, change
        self.producer = engine(pair.model, pair.producer, "P")
        self.consumer = engine(pair.model, pair.consumer, "C")
        if change:
            changed = CHANGES[change](self.producer.description, which)
            self.producer = replace(self.producer, description=changed)

    def __repr__(self) -> str:
        return f"{self.pair!r}, changed: {self.change or 'nothing'}"

    @property
    def request(self) -> Request:
        return self.pair.request


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """A pair; some with a change of one side's description.

    What is changed follows from one number: drawn one by one, some changes would be rare.
    """
    pair = draw(pairs())
    number = random.Random(draw(_NUMBERS))
    if number.random() >= _CHANGED:
        return Drawn(pair)
    names = sorted(CHANGES)
    if len(pair.model.groups) > 1:
        names += ["exchanged groups"] * 3
    return Drawn(pair, number.choice(names), number.randrange(1 << 10))


Change = Callable[[EngineDescription, int], EngineDescription]
"""Changes the producer; the number chooses what."""


def _names(engine: EngineDescription) -> list[tuple[str, str]]:
    return sorted(
        {tensor.name for worker in engine.workers for tensor in worker.tensors}
    )


def _with_tensors(
    engine: EngineDescription,
    tensors: Callable[[int, Sequence[PagedTensor]], Sequence[PagedTensor]],
) -> EngineDescription:
    workers = tuple(
        msgspec.structs.replace(worker, tensors=tuple(tensors(index, worker.tensors)))
        for index, worker in enumerate(engine.workers)
    )
    return msgspec.structs.replace(engine, workers=workers)


def _every(
    engine: EngineDescription,
    which: int,
    changed: Callable[[PagedTensor], PagedTensor | None],
) -> EngineDescription:
    """Change one tensor on every worker; None takes it away."""
    names = _names(engine)
    name = names[which % len(names)]

    def tensors(_: int, before: Sequence[PagedTensor]) -> list[PagedTensor]:
        after = [
            changed(tensor) if tensor.name == name else tensor for tensor in before
        ]
        return [tensor for tensor in after if tensor is not None]

    return _with_tensors(engine, tensors)


def _fact(name: str) -> Change:
    def change(engine: EngineDescription, _: int) -> EngineDescription:
        return msgspec.structs.replace(
            engine, facts=msgspec.structs.replace(engine.facts, **{name: "another"})
        )

    return change


def _setting(engine: EngineDescription, which: int) -> EngineDescription:
    settings = (Setting(name=f"config.{which}", value="another"),)
    return msgspec.structs.replace(
        engine, facts=msgspec.structs.replace(engine.facts, settings=settings)
    )


def _format(name: str) -> Change:
    def change(engine: EngineDescription, which: int) -> EngineDescription:
        def other(tensor: PagedTensor) -> PagedTensor:
            changed = msgspec.structs.replace(tensor.format, **{name: "another"})
            return msgspec.structs.replace(tensor, format=changed)

        return _every(engine, which, other)

    return change


def _group(name: str, value: str | int) -> Change:
    def change(engine: EngineDescription, which: int) -> EngineDescription:
        groups: list[CacheGroup] = list(engine.groups)
        at = which % len(groups)
        groups[at] = msgspec.structs.replace(groups[at], **{name: value})
        return msgspec.structs.replace(engine, groups=tuple(groups))

    return change


def _smaller_cells(engine: EngineDescription, which: int) -> EngineDescription:
    def smaller(tensor: PagedTensor) -> PagedTensor:
        less = tensor.element_bytes or tensor.cell_bytes // 2 or 1
        return msgspec.structs.replace(
            tensor, cell_bytes=max(less, tensor.cell_bytes - less)
        )

    return _every(engine, which, smaller)


def _longer_tiles(engine: EngineDescription, which: int) -> EngineDescription:
    """Cells of as many bytes that hold twice as many tokens, where blocks are long enough."""

    def longer(tensor: PagedTensor) -> PagedTensor:
        tile = 2 * tensor.tile_tokens
        return (
            tensor
            if tensor.block_tokens % tile
            else msgspec.structs.replace(tensor, tile_tokens=tile)
        )

    return _every(engine, which, longer)


def _hole(engine: EngineDescription, which: int) -> EngineDescription:
    """One worker lacks one tensor; others may have the same heads."""
    names, workers = _names(engine), len(engine.workers)
    name = names[which % len(names)]
    return _with_tensors(
        engine,
        lambda index, before: [
            x for x in before if x.name != name or index != which // 7 % workers
        ],
    )


def _another_group(engine: EngineDescription, _: int) -> EngineDescription:
    return msgspec.structs.replace(
        engine, groups=(*engine.groups, CacheGroup(policy="full", block_tokens=4))
    )


def _exchanged_groups(engine: EngineDescription, _: int) -> EngineDescription:
    """The first group is the last one, and its tensors are in it."""
    last = len(engine.groups) - 1

    def moved(_: int, before: Sequence[PagedTensor]) -> list[PagedTensor]:
        return [
            msgspec.structs.replace(tensor, group=last - tensor.group)
            for tensor in before
        ]

    return msgspec.structs.replace(
        _with_tensors(engine, moved), groups=engine.groups[::-1]
    )


def _renamed_model(engine: EngineDescription, _: int) -> EngineDescription:
    """Another name for the same weights, and another limit: neither matters."""
    facts = msgspec.structs.replace(engine.facts, model="another", max_model_tokens=77)
    return msgspec.structs.replace(engine, facts=facts)


def _extra_layer(engine: EngineDescription, which: int) -> EngineDescription:
    """The producer keeps a layer more, e.g. of a draft model: it is not read."""

    def more(_: int, before: Sequence[PagedTensor]) -> list[PagedTensor]:
        return [
            *before,
            *(
                msgspec.structs.replace(x, layer="draft.0")
                for x in before[which % 2 : which % 2 + 1]
            ),
        ]

    return _with_tensors(engine, more)


CHANGES: dict[str, Change] = {
    **{
        name: _fact(name)
        for name in (
            "fingerprint",
            "dtype",
            "cache_dtype",
            "quantization",
            "speculative",
        )
    },
    "a setting": _setting,
    "format.dtype": _format("dtype"),
    "format.quantization": _format("quantization"),
    "format.packing": _format("packing"),
    "policy": _group("policy", "other"),
    "window": _group("window_tokens", 5),
    "smaller cells": _smaller_cells,
    "longer tiles": _longer_tiles,
    "a layer less": lambda engine, which: _every(engine, which, lambda _: None),
    "a hole": _hole,
    "a group more": _another_group,
    "exchanged groups": _exchanged_groups,
    "renamed model": _renamed_model,
    "extra layer": _extra_layer,
}
