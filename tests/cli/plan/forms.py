"""Random short forms, small enough that every byte of their caches can be counted."""

from __future__ import annotations

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
    count = layers or draw(st.integers(1, 6))
    size = draw(st.integers(1, 4))
    pairs = [f"layers={count}", f"tp={size}"]
    kind = draw(st.sampled_from(kinds))
    if kind == "mla":
        pairs.append(f"mla={draw(st.integers(1, 9))}")
    else:
        pairs += [f"heads={draw(st.integers(1, 6))}", f"dim={draw(st.integers(1, 8))}"]
    if kind == "cpu":
        pairs.append("layout=CPU")
    else:
        pairs.append(
            f"layout={draw(st.sampled_from([name for name in LAYOUTS if name != 'CPU']))}"
        )
    if kind == "heads":
        pairs.append(f"kv={draw(st.sampled_from(['packed', 'apart']))}")
    pairs.append(f"dtype={draw(st.sampled_from(sorted(DTYPE_BYTES)))}")
    kernel = draw(st.integers(1, 4))
    block = kernel * draw(st.integers(1, 3))
    pairs += [
        f"block={block}",
        f"kernel_block={kernel}",
        f"blocks={draw(st.integers(2, 5))}",
    ]
    pairs += _stages(draw, count)
    pairs += _contexts(draw, size, block, kind == "mla")
    pairs += _windows_and_states(draw, count)
    return ",".join(draw(st.permutations(pairs)))


def _stages(draw: st.DrawFn, layers: int) -> list[str]:
    if draw(st.booleans()):
        return [f"pp={draw(st.integers(1, layers))}"]
    first = draw(st.integers(1, layers))
    return [
        f"stages={first}+{layers - first}" if first < layers else f"stages={layers}"
    ]


def _contexts(draw: st.DrawFn, tp: int, block: int, is_mla: bool) -> list[str]:
    pcp = draw(st.integers(1, 2))
    sizes = [size for size in range(1, pcp * tp + 1) if pcp * tp % size == 0]
    if not is_mla:
        sizes = [
            s for s in sizes if pcp % s == 0 or (s % pcp == 0 and tp % (s // pcp) == 0)
        ]
    dcp = draw(st.sampled_from(sizes))
    runs = [run for run in range(1, block + 1) if block % run == 0]
    run = (
        [f"interleave={draw(st.sampled_from(runs))}"]
        if dcp > 1 and draw(st.booleans())
        else []
    )
    return [f"pcp={pcp}", f"dcp={dcp}", *run]


def _windows_and_states(draw: st.DrawFn, layers: int) -> list[str]:
    pairs = []
    if layers > 2 and draw(st.booleans()):
        pairs.append(f"window={draw(st.integers(1, 40))}@0-{layers - 2}/2")
    if layers > 1 and draw(st.booleans()):
        pairs.append(f"state_layers={layers - 1}")
        if draw(st.booleans()):
            pairs.append(f"ssm={draw(st.integers(1, 6))}x{draw(st.integers(1, 4))}")
        if draw(st.booleans()) or not pairs[-1].startswith("ssm"):
            star = draw(st.sampled_from(["", "*"]))
            pairs.append(
                f"conv=x{draw(st.integers(1, 8))}+B{draw(st.integers(1, 4))}{star}"
            )
            pairs += [
                f"conv_width={draw(st.integers(1, 3))}",
                f"conv_layout={draw(st.sampled_from(['SD', 'DS']))}",
            ]
        pairs.append(f"state_dtype={draw(st.sampled_from(sorted(DTYPE_BYTES)))}")
    return pairs
