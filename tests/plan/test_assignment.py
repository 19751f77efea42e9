"""Assignment of reads: replicas used evenly, everything read exactly once, no worker left out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.assignment import MAX_LACKS, AssignedRead, Assignment, Lack, assign
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


def check(
    consumers: list[WorkerDescription],
    producers: list[WorkerDescription],
    assignment: Assignment,
) -> None:
    """Everything that a worker needs and any producer worker holds is read once, from a holder; the rest is a lack."""
    everything = [
        one for side in (consumers, producers) for of in side for one in of.tensors
    ]
    count = math.lcm(
        *(one.interleave.ranks * one.interleave.run_tokens for one in everything)
    )
    held = [
        {item for one in of.tensors for item in items(one, count)} for of in producers
    ]
    anywhere: set[Item] = set().union(*held)
    for here, read in zip(consumers, assignment.sources, strict=True):
        got: Counter[Item] = Counter()
        needed = {item for one in here.tensors for item in items(one, count)}
        for producer, sources in read.items():
            shares = {
                one.name: tokens_of(share_of(one), count)
                for one in producers[producer].tensors
            }
            for name, heads in sources:
                part = {
                    (name, head, token)
                    for head in range(heads.start, heads.stop)
                    for token in shares[name]
                }
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
        share = Interleave(
            ranks=ranks, rank=draw(st.integers(0, ranks - 1)), run_tokens=run
        )
        for kind in draw(st.sampled_from((("k",), ("k", "v"), ("v",), ()))):
            start = draw(st.integers(0, 4))
            heads = Range(start, draw(st.integers(start, 5)))
            tensors.append(
                tensor(
                    kind=kind,
                    heads=heads,
                    interleave=share if ranks > 1 else Interleave(),
                )
            )
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
            times.update(
                (name, head, index)
                for name, part in sources
                for head in range(part.start, part.stop)
            )
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
        (
            {"tp": 2, "model": "mla"},
            {"tp": 4, "dcp": 4, "model": "mla"},
            [[0, 1, 2, 3]] * 2,
        ),
        ({"tp": 1, "pcp": 4}, {"tp": 1, "pcp": 2}, [[0], [1], [0], [1]]),
        ({"pp": 2}, {"pp": 1}, [[0], [0]]),
        ({"pp": 1}, {"pp": 2}, [[0, 1]]),
        ({"stages": (1, 3)}, {"stages": (2, 2)}, [[0], [0, 1]]),
        (
            {"tp": 2, "dcp": 2, "model": "mla"},
            {"tp": 4, "dcp": 4, "model": "mla"},
            [[0, 2], [1, 3]],
        ),
    ],
)
def test_who_reads_from_whom(
    here: dict[str, object], there: dict[str, object], expected: list[list[int]]
) -> None:
    assignment = pair(sharded("D", **here), sharded(**there))  # type: ignore[arg-type]
    assert readers(assignment) == expected
    assert assignment.lacks == ()


def test_producers_without_a_reader_are_notified_by_the_consumers_with_the_fewest_routes() -> (
    None
):
    """Two KV heads on eight ranks feed two consumers: six of the eight are not read."""
    assignment = pair(sharded("D", tp=2, heads=2), sharded(tp=8, heads=2))
    assert readers(assignment) == [[0], [4]]
    assert assignment.released == ((1, 3, 6), (2, 5, 7))


def test_heads_that_touch_are_one_source() -> None:
    """Where another worker's borders cut a range, the parts that come from one worker are joined again."""
    consumers = [
        worker([tensor(heads=Range(0, 4))]),
        worker([tensor(heads=Range(2, 4))], Place(tp=1)),
    ]
    assignment = assign(consumers, [worker([tensor(heads=Range(0, 4))])])
    assert assignment.sources == (
        {0: (AssignedRead(("layers.0", "kv"), Range(0, 4)),)},
        {0: (AssignedRead(("layers.0", "kv"), Range(2, 4)),)},
    )


def test_the_bytes_of_earlier_tensors_count_where_replicas_are_equally_good() -> None:
    """Three layers with patterns of their own, one reader: the replica that has sent least is next."""
    wide, narrow, last = (
        tensor(layer=name, cell_bytes=size)
        for name, size in (("0", 32), ("1", 8), ("2", 16))
    )
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
        (
            tensor(layer="draft.0"),
            [tensor()],
            Lack(("draft.0", "kv"), Range(0, 2), Interleave()),
        ),
        (
            tensor(),
            [tensor(interleave=Interleave(ranks=2, rank=0, run_tokens=4))],
            Lack(
                ("layers.0", "kv"),
                Range(0, 2),
                Interleave(ranks=2, rank=1, run_tokens=4),
            ),
        ),
    ],
    ids=["heads", "a layer", "a share of the tokens"],
)
def test_what_has_no_holder_is_named(
    consumer: PagedTensor, producers: list[PagedTensor], lack: Lack
) -> None:
    holders = [worker([one], Place(tp=rank)) for rank, one in enumerate(producers)]
    assert assign([worker([consumer])], holders).lacks == (lack,)


def test_a_description_that_claims_very_many_ranks_costs_no_more_than_its_first_lacks() -> (
    None
):
    claim = Interleave(ranks=65536, rank=0, run_tokens=1)
    layers = [f"layers.{index}" for index in range(64)]
    assignment = assign(
        [worker([tensor(layer=layer) for layer in layers])],
        [worker([tensor(layer=layer, interleave=claim) for layer in layers])],
    )
    assert len(assignment.lacks) == MAX_LACKS
    assert assignment.lacks[0] == Lack(
        ("layers.0", "kv"), Range(0, 2), Interleave(ranks=65536, rank=1, run_tokens=1)
    )


def test_what_only_the_producer_has_is_not_read() -> None:
    assignment = assign([worker()], [worker([tensor(), tensor(layer="draft.0")])])
    assert assignment.sources == (
        {0: (AssignedRead(("layers.0", "kv"), Range(0, 2)),)},
    )


def hybrid(tp: int, heads: int, states: int) -> list[WorkerDescription]:
    """Ranks of a model whose K has `heads` heads (0: one MLA latent) and whose state has `states`."""
    made = []
    for rank in range(tp):
        kept = max(1, heads // tp)
        first = rank * heads // tp if heads else 0
        attention = tensor(
            kind="k" if heads else "mla", heads=Range(first, first + kept)
        )
        state = tensor(
            kind="ssm", heads=Range(rank * states // tp, (rank + 1) * states // tp)
        )
        made.append(other(worker(place=Place(tp=rank)), tensors=(attention, state)))
    return made


@pytest.mark.parametrize(
    "heads", [0, 1, 2, 4, 8, 16], ids=lambda heads: f"{heads} heads" if heads else "MLA"
)
@pytest.mark.parametrize("here", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("there", [1, 2, 4, 8, 16])
def test_replicated_heads_are_read_where_the_state_is_read_anyway(
    here: int, there: int, heads: int
) -> None:
    """Before, in turn from all that hold them: MLA, TP 8 -> 16 took 30 routes, one head 4 -> 8 14, two heads 12."""
    consumers, producers = hybrid(here, heads, 16), hybrid(there, heads, 16)
    assignment = assign(consumers, producers)
    check(consumers, producers, assignment)
    assert sum(map(len, assignment.sources)) == max(here, there)
    times = Counter(
        producer
        for read in assignment.sources
        for producer, sources in read.items()
        for _ in sources
    )
    assert max(times.values()) <= 2 * -(-here // there)


@st.composite
def mixed(draw: st.DrawFn) -> list[WorkerDescription]:
    """Ranks that divide one tensor, and hold another one in any part."""
    count, heads = draw(st.integers(1, 6)), 4
    made = []
    for rank in range(count):
        first = draw(st.sampled_from((0, 2)))
        replica = tensor(kind="k", heads=Range(first, first + 2))
        own = tensor(
            kind="ssm",
            heads=Range(
                rank * heads // count,
                max(rank * heads // count + 1, (rank + 1) * heads // count),
            ),
        )
        made.append(other(worker(place=Place(tp=rank)), tensors=(replica, own)))
    return made


@given(mixed(), mixed())
def test_a_reader_takes_a_new_route_only_where_those_that_it_has_serve_enough_already(
    consumers: list[WorkerDescription], producers: list[WorkerDescription]
) -> None:
    """Of all ways to share the replicas out evenly, the fewest new routes: compared with trying all of them."""
    assignment = assign(consumers, producers)
    check(consumers, producers, assignment)
    by_state = [
        {
            producer
            for producer, sources in read.items()
            if any(one.name[1] == "ssm" for one in sources)
        }
        for read in assignment.sources
    ]
    for first in (0, 2):
        wants = [
            n for n, one in enumerate(consumers) if one.tensors[0].heads.start == first
        ]
        holds = [
            n for n, one in enumerate(producers) if one.tensors[0].heads.start == first
        ]
        if not wants or not holds:
            continue
        chosen = [
            next(
                p
                for p, sources in assignment.sources[reader].items()
                if any(one.name[1] == "k" for one in sources)
            )
            for reader in wants
        ]
        served = [chosen.count(holder) for holder in holds]
        assert max(served) - min(served) <= 1
        fewest = min(
            sum(
                holder not in by_state[reader]
                for reader, holder in zip(wants, ways, strict=True)
            )
            for ways in itertools.product(holds, repeat=len(wants))
            if max(map(ways.count, holds)) - min(map(ways.count, holds)) <= 1
        )
        assert (
            sum(
                holder not in by_state[reader]
                for reader, holder in zip(wants, chosen, strict=True)
            )
            == fewest
        )
