"""Assignment of reads: replicas used evenly, everything read exactly once, no worker left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.assignment import MAX_LACKS, Assignment, Lack, Source, assign
from kvferry.plan.tokens import share_of
from kvferry.protocol.geometry import Interleave, PagedTensor, Place, Range
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from tests.plan.engines import sharded
from tests.plan.samples import other, tensor, tokens_of, worker


def readers(assignment: Assignment) -> list[list[int]]:
    """Per consumer worker the producer workers that it reads from."""
    return [list(of) for of in assignment.sources]


def pair(consumer: EngineDescription, producer: EngineDescription) -> Assignment:
    return assign(consumer.workers, producer.workers)


Item = tuple[tuple[str, str], int, int]
"""A tensor's name, a head and a token."""


def items(of: PagedTensor, count: int) -> Iterator[Item]:
    for head in range(of.heads.start, of.heads.stop):
        yield from ((of.name, head, token) for token in tokens_of(of.interleave, count))


def check(consumers: list[WorkerDescription], producers: list[WorkerDescription], assignment: Assignment) -> None:
    """Everything that a worker needs and any producer worker holds is read once, from a holder; the rest is a lack."""
    everything = [one for side in (consumers, producers) for of in side for one in of.tensors]
    count = math.lcm(*(one.interleave.ranks * one.interleave.run_tokens for one in everything))
    held = [{item for one in of.tensors for item in items(one, count)} for of in producers]
    anywhere: set[Item] = set().union(*held)
    for here, read in zip(consumers, assignment.sources, strict=True):
        got: Counter[Item] = Counter()
        needed = {item for one in here.tensors for item in items(one, count)}
        for producer, sources in read.items():
            shares = {one.name: tokens_of(share_of(one), count) for one in producers[producer].tensors}
            for name, heads in sources:
                part = {(name, head, token) for head in range(heads.start, heads.stop) for token in shares[name]}
                assert part <= held[producer]
                got.update(part & needed)
        assert set(got.values()) <= {1}
        assert set(got) == needed & anywhere
        assert not needed - anywhere or assignment.lacks


def check_notified(assignment: Assignment, producers: int) -> None:
    """Every producer worker is notified; one without a reader by exactly one consumer worker."""
    for producer in range(producers):
        readers = sum(producer in read for read in assignment.sources)
        reported = sum(producer in of for of in assignment.released)
        assert reported == (0 if readers else 1)
        assert assignment.expected(producer) == readers + reported


@st.composite
def shards(draw: st.DrawFn) -> list[WorkerDescription]:
    """Workers that hold any heads of up to two tensors, all of the tokens or one share of them."""
    ranks = draw(st.sampled_from((1, 1, 2, 3)))
    run = draw(st.sampled_from((1, 2)))
    workers = []
    for index in range(draw(st.integers(1, 6))):
        tensors = []
        share = Interleave(ranks=ranks, rank=draw(st.integers(0, ranks - 1)), run_tokens=run)
        for kind in draw(st.sampled_from((("k",), ("k", "v"), ("v",), ()))):
            start = draw(st.integers(0, 4))
            heads = Range(start, draw(st.integers(start, 5)))
            tensors.append(tensor(kind=kind, heads=heads, interleave=share if ranks > 1 else Interleave()))
        workers.append(other(worker(place=Place(tp=index)), tensors=tuple(tensors)))
    return workers


@given(shards(), shards())
def test_any_shards_are_read_once_from_holders_or_named_as_lacking(
    consumers: list[WorkerDescription], producers: list[WorkerDescription]
) -> None:
    assignment = assign(consumers, producers)
    check(consumers, producers, assignment)
    check_notified(assignment, len(producers))


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    heads=st.integers(1, 8),
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_replicas_serve_equally_many_readers_or_one_more(
    sizes: tuple[int, int], heads: int, replicas: tuple[int, int]
) -> None:
    consumer = sharded("D", tp=sizes[0], pcp=replicas[0], heads=heads)
    producer = sharded(tp=sizes[1], pcp=replicas[1], heads=heads)
    assignment = pair(consumer, producer)
    check(list(consumer.workers), list(producer.workers), assignment)
    check_notified(assignment, len(producer.workers))
    times: Counter[tuple[tuple[str, str], int, int]] = Counter()
    for read in assignment.sources:
        for index, sources in read.items():
            times.update((name, head, index) for name, part in sources for head in range(part.start, part.stop))
    for name in {one.name for of in producer.workers for one in of.tensors}:
        for head in range(heads):
            holders = [
                index
                for index, of in enumerate(producer.workers)
                for one in of.tensors
                if one.name == name and one.heads.start <= head < one.heads.stop
            ]
            served = [times[name, head, index] for index in holders]
            assert max(served) - min(served) <= 1


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ({"tp": 2}, {"tp": 2}, [[0], [1]]),
        ({"tp": 2, "heads": 6}, {"tp": 3, "heads": 6}, [[0, 1], [1, 2]]),
        ({"tp": 3, "heads": 5}, {"tp": 2, "heads": 5}, [[0], [0, 1], [1]]),
        ({"tp": 1, "heads": 2}, {"tp": 4, "heads": 2}, [[0, 2]]),
        ({"tp": 8, "heads": 4}, {"tp": 2, "heads": 4}, [[0]] * 4 + [[1]] * 4),
        (
            {"tp": 2, "heads": 2, "model": "hybrid"},
            {"tp": 8, "heads": 2, "model": "hybrid"},
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        ({"tp": 4, "model": "mla"}, {"tp": 2, "model": "mla"}, [[0], [1], [0], [1]]),
        ({"tp": 2, "model": "mla"}, {"tp": 4, "dcp": 4, "model": "mla"}, [[0, 1, 2, 3]] * 2),
        ({"tp": 1, "pcp": 4}, {"tp": 1, "pcp": 2}, [[0], [1], [0], [1]]),
        ({"pp": 2}, {"pp": 1}, [[0], [0]]),
        ({"pp": 1}, {"pp": 2}, [[0, 1]]),
        ({"stages": (1, 3)}, {"stages": (2, 2)}, [[0], [0, 1]]),
        ({"tp": 2, "dcp": 2, "model": "mla"}, {"tp": 4, "dcp": 4, "model": "mla"}, [[0, 2], [1, 3]]),
    ],
)
def test_who_reads_from_whom(here: dict[str, object], there: dict[str, object], expected: list[list[int]]) -> None:
    assignment = pair(sharded("D", **here), sharded(**there))  # type: ignore[arg-type]
    assert readers(assignment) == expected
    assert assignment.lacks == ()


def test_producers_without_a_reader_are_notified_by_the_consumers_with_the_fewest_routes() -> None:
    """Two KV heads on eight ranks feed two consumers: six of the eight are not read."""
    assignment = pair(sharded("D", tp=2, heads=2), sharded(tp=8, heads=2))
    assert readers(assignment) == [[0], [4]]
    assert assignment.released == ((1, 3, 6), (2, 5, 7))


def test_heads_that_touch_are_one_source() -> None:
    """Where another worker's borders cut a range, the parts that come from one worker are joined again."""
    consumers = [worker([tensor(heads=Range(0, 4))]), worker([tensor(heads=Range(2, 4))], Place(tp=1))]
    assignment = assign(consumers, [worker([tensor(heads=Range(0, 4))])])
    assert assignment.sources == (
        {0: (Source(("layers.0", "kv"), Range(0, 4)),)},
        {0: (Source(("layers.0", "kv"), Range(2, 4)),)},
    )


def test_the_bytes_of_earlier_tensors_count_where_replicas_are_equally_good() -> None:
    """Three layers with patterns of their own, one reader: the replica that has sent least is next."""
    wide, narrow, last = (tensor(layer=name, cell_bytes=size) for name, size in (("0", 32), ("1", 8), ("2", 16)))
    lone = worker([wide, narrow, last])
    both = [worker([wide, narrow, last]), worker([wide, narrow, last], Place(tp=1))]
    only_wide = assign([worker([wide]), worker([narrow, last], Place(tp=1))], both)
    assert readers(only_wide) == [[0], [1]]
    assert readers(assign([lone], both)) == [[0]], "one pattern comes from one worker"


@pytest.mark.parametrize(
    ("consumer", "producers", "lack"),
    [
        (
            tensor(heads=Range(0, 4)),
            [tensor(heads=Range(0, 1)), tensor(heads=Range(3, 4))],
            Lack(("layers.0", "kv"), Range(1, 3), Interleave()),
        ),
        (tensor(layer="draft.0"), [tensor()], Lack(("draft.0", "kv"), Range(0, 2), Interleave())),
        (
            tensor(),
            [tensor(interleave=Interleave(ranks=2, rank=0, run_tokens=4))],
            Lack(("layers.0", "kv"), Range(0, 2), Interleave(ranks=2, rank=1, run_tokens=4)),
        ),
    ],
    ids=["heads", "a layer", "a share of the tokens"],
)
def test_what_has_no_holder_is_named(consumer: PagedTensor, producers: list[PagedTensor], lack: Lack) -> None:
    holders = [worker([one], Place(tp=rank)) for rank, one in enumerate(producers)]
    assert assign([worker([consumer])], holders).lacks == (lack,)


def test_a_description_that_claims_very_many_ranks_costs_no_more_than_its_first_lacks() -> None:
    claim = Interleave(ranks=65536, rank=0, run_tokens=1)
    layers = [f"layers.{index}" for index in range(64)]
    assignment = assign(
        [worker([tensor(layer=layer) for layer in layers])],
        [worker([tensor(layer=layer, interleave=claim) for layer in layers])],
    )
    assert len(assignment.lacks) == MAX_LACKS
    assert assignment.lacks[0] == Lack(("layers.0", "kv"), Range(0, 2), Interleave(ranks=65536, rank=1, run_tokens=1))


def test_what_only_the_producer_has_is_not_read() -> None:
    assignment = assign([worker()], [worker([tensor(), tensor(layer="draft.0")])])
    assert assignment.sources == ({0: (Source(("layers.0", "kv"), Range(0, 2)),)},)
