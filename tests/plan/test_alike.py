"""Tensors that are alike are checked once, and no error is missed by that."""

from __future__ import annotations

from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from kvferry.plan.refusals import check_description
from kvferry.plan.tokens import share_of
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Place, Range
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from tests.draws import draws
from tests.protocol.samples import make_description, make_tensor, make_worker

LAST = 1 << 63
GROUPS = (
    CacheGroup(policy="full", block_tokens=16),
    CacheGroup(policy="window", block_tokens=32, window_tokens=64),
    CacheGroup(policy="state", block_tokens=16),
)
FIELDS: dict[str, list[Any]] = {
    "group": [0, 1, 2, 3],
    "base": [
        0,
        1 << 40,
        LAST - (1 << 13) - 4096,
        LAST - 8192 * 1000,
        LAST - 8192 * 1000 + 1,
        LAST - 1,
    ],
    "blocks": [1, 1000, 1001, 1 << 31],
    "block_tokens": [4, 8, 16, 24, 32],
    "block_stride": [0, 8192, 1 << 47],
    "heads": [Range(2, 4), Range(4, 6), Range(4, 2), Range(0, 1 << 25)],
    "head_stride": [0, 4096],
    "tile_tokens": [1, 3, 16],
    "tile_stride": [0, 256],
    "cell_bytes": [256, 128, 6],
    "element_bytes": [0, 2, 3, 256],
    "element_stride": [0, 2, 1 << 40],
    "interleave": [
        Interleave(),
        Interleave(run_tokens=8),
        Interleave(ranks=2),
        Interleave(ranks=2, rank=1, run_tokens=3),
        Interleave(ranks=2, rank=2),
    ],
    "scales": [(), (1.0,), (2.0,), (1.0, 2.0), (1.0, 2.0, 3.0)],
    "format": [
        Format(dtype="bfloat16"),
        Format(dtype="float16"),
        Format(dtype="bfloat16", packing="p"),
    ],
}
CHANGES = st.lists(
    st.sampled_from(sorted(FIELDS)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(FIELDS[name]))
    ),
    max_size=2,
).map(dict)


def tensor(number: int, changes: dict[str, Any]) -> PagedTensor:
    return make_tensor(
        **(
            {"layer": f"layers.{number}", "group": 0, "format": FIELDS["format"][0]}
            | changes
        )
    )


def engine(*tensors: PagedTensor) -> EngineDescription:
    return make_description(
        groups=GROUPS, workers=(make_worker(place=Place(), tensors=tensors),)
    )


def is_refused(*tensors: PagedTensor) -> bool:
    try:
        check_description(engine(*tensors))
    except InvalidMessage:
        return True
    return False


def block_list(one: PagedTensor) -> tuple[int, int, Interleave]:
    """The properties that all tensors of one block list share."""
    return (one.blocks, one.block_tokens, share_of(one))


@settings(max_examples=draws(200), deadline=None)
@given(st.lists(CHANGES, min_size=2, max_size=4))
@example([{}, {"base": LAST - 8192 * 1000 + 1}])
@example([{}, {"scales": (1.0, 2.0, 3.0)}])
def test_a_description_is_refused_when_any_of_its_tensors_would_be(
    changes: list[dict[str, Any]],
) -> None:
    tensors = [tensor(number, of) for number, of in enumerate(changes)]
    lists = {(one.group, block_list(one)) for one in tensors}
    expected = any(map(is_refused, tensors)) or len(lists) > len(
        {group for group, _ in lists}
    )
    event("refused" if expected else "taken")
    assert is_refused(*tensors) == expected
