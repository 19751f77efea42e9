"""Random short forms, small enough that every byte of their caches can be counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hypothesis import strategies as st

from kvferry.cli.plan.short_form import (
    DTYPE_BYTES,
    LAYOUTS,
    ShortForm,
    form_of,
    pairs_of,
)
from kvferry.cli.plan.sides import read_sides
from kvferry.protocol.handshake import EngineDescription

DENSE = "layers=4,heads=4,dim=8,blocks=64"
"""A small engine; tests append further keys."""

T = TypeVar("T")
KINDS = ("heads", "heads", "mla", "cpu")


def read_form(text: str) -> ShortForm:
    """The values of a short form."""
    return form_of(pairs_of(text))


def read_pair(
    producer: str, consumer: str
) -> tuple[EngineDescription, EngineDescription]:
    """Both engines."""
    there, here = read_sides(producer, consumer, bytes)
    return there.engine, here.engine


@st.composite
def short_forms(
    draw: st.DrawFn, layers: int | None = None, kinds: tuple[str, ...] = KINDS
) -> str:
    """A valid short form with any of the keys."""

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    def one_of(values: Iterable[T]) -> T:
        return draw(st.sampled_from(list(values)))

    count = layers or number(1, 6)
    kind = one_of(kinds)
    form: dict[str, object] = {"layers": count, "dtype": one_of(DTYPE_BYTES)}
    if kind == "mla":
        form["mla"] = number(1, 9)
    else:
        form |= {"heads": number(1, 6), "dim": number(1, 8)}
    form["layout"] = "CPU"
    if kind != "cpu":
        form["layout"] = one_of(name for name in LAYOUTS if name != "CPU")
    if kind == "heads":
        form["kv"] = one_of(["packed", "apart"])
    kernel = number(1, 4)
    block = kernel * number(1, 3)
    form |= {"block": block, "kernel_block": kernel, "blocks": number(2, 5)}
    # Stages.
    first = number(1, count)
    stages = f"{first}+{count - first}" if first < count else f"{first}"
    form |= one_of([{"pp": first}, {"stages": stages}])
    # Context parallel ranks: in groups that are ranks of one prefill rank, or whole prefill ranks.
    tp = number(1, 4)
    pcp = number(1, 2)
    sizes = [size for size in range(1, pcp * tp + 1) if pcp * tp % size == 0]
    if kind != "mla":
        sizes = [s for s in sizes if pcp % s == 0 or s % pcp == tp % (s // pcp) == 0]
    form |= {"tp": tp, "pcp": pcp, "dcp": one_of(sizes)}
    if form["dcp"] != 1 and number(0, 1):
        form["interleave"] = one_of(n for n in range(1, block + 1) if block % n == 0)
    # Windows and states.
    if count > 2 and number(0, 1):
        form["window"] = f"{number(1, 40)}@0-{count - 2}/2"
    if count > 1 and number(0, 1):
        form |= {"state_layers": count - 1, "state_dtype": one_of(DTYPE_BYTES)}
        kept = one_of(["ssm", "conv", "both"])
        if kept != "conv":
            form["ssm"] = f"{number(1, 6)}x{number(1, 4)}"
        if kept != "ssm":
            form["conv"] = f"x{number(1, 8)}+B{number(1, 4)}{one_of(['', '*'])}"
            form |= {"conv_width": number(1, 3), "conv_layout": one_of(["SD", "DS"])}
    pairs = [f"{key}={value}" for key, value in form.items()]
    return ",".join(draw(st.permutations(pairs)))
