"""The plan gives the answers of earlier designs of heterogeneous transfers, each under its own name.

Worked out from what their names and fields meant: `D` is the consumer, `P` the producer, `K` the KV heads of the model.
They need sizes that divide; where the plan goes on without that, the last tests of a class say how.
`tests/connector/test_earlier_designs_oracle.py` compares with what of them is installed with vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.cost import Costs
from kvferry.plan.descriptors import route_tables
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import Route, Slice, TransferPlan
from kvferry.protocol.geometry import PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.worker.peers.plan_cache import PlanCache
from tests.plan.engines import CELL_BYTES, CONV_CELL_BYTES, STATE_HEAD_BYTES, sharded
from tests.plan.samples import other, worker

NO_POOL = Costs(staged_run_bytes=0)
TOKEN_BYTES = 2 * CELL_BYTES
"""K and V of one head and token."""
BLOCK_TOKENS = 4


def plans(d_tp: int, p_tp: int, heads: int = 4, **model: Any) -> tuple[TransferPlan, ...]:
    consumer = sharded("D", tp=d_tp, heads=heads, **model)
    return plan_engine(consumer, sharded(tp=p_tp, heads=heads, **model), NO_POOL)


def sources(plan: TransferPlan, group: int = 0) -> list[int]:
    """The producer ranks that a group is read from."""
    return [route.worker for route in plan.routes if of_group(route, group)]


def of_group(route: Route, group: int) -> list[Slice]:
    return [item for item in route.slices if item.tokens.group == group]


def heads_of(tp: int, heads: int, rank: int) -> Range:
    """The heads that a rank holds, where one of `tp` and `heads` divides the other."""
    if tp > heads:
        return Range(rank * heads // tp, rank * heads // tp + 1)
    return Range(rank * heads // tp, (rank + 1) * heads // tp)


class TestComputeTpMapping:
    """`source_ranks_per_group`, `all_source_ranks`, `rank_to_attention_slot`, `rank_offset_factor`."""

    @pytest.mark.parametrize(
        ("d_tp", "p_tp", "heads", "expected"),
        [
            (2, 2, 8, [[0], [1]]),
            (4, 2, 8, [[0], [0], [1], [1]]),
            (1, 2, 8, [[0, 1]]),
            (2, 4, 8, [[0, 1], [2, 3]]),
            (1, 4, 2, [[0, 2]]),
            (2, 4, 2, [[0], [2]]),
            (2, 8, 2, [[0], [4]]),
            (8, 2, 4, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        ],
    )
    def test_source_ranks_of_attention(self, d_tp: int, p_tp: int, heads: int, expected: list[list[int]]) -> None:
        """More P ranks: one of those that hold each head. More D ranks: the one that holds this rank's heads."""
        assert [sources(plan) for plan in plans(d_tp, p_tp, heads)] == expected

    def test_source_ranks_of_a_state_are_all_of_them_though_attention_needs_fewer(self) -> None:
        (first, second) = plans(2, 8, heads=2, model="hybrid")
        assert (sources(first, 0), sources(first, 1)) == ([0], [0, 1, 2, 3])
        assert (sources(second, 0), sources(second, 1)) == ([4], [4, 5, 6, 7])
        assert [route.worker for route in first.routes] == [0, 1, 2, 3], "all source ranks, each once"

    @pytest.mark.parametrize(("d_tp", "p_tp", "heads"), [(1, 2, 8), (2, 4, 8), (1, 4, 2), (2, 8, 4), (2, 8, 2)])
    def test_the_head_slot_is_where_a_source_ranks_heads_begin_in_the_local_block(
        self, d_tp: int, p_tp: int, heads: int
    ) -> None:
        for plan in plans(d_tp, p_tp, heads):
            reading = [route for route in plan.routes if route.slices]
            for slot, route in enumerate(reading):
                for item in route.slices:
                    assert item.local_heads.start == slot * len(item.heads)
                    assert item.remote_heads.start == 0, "D does not index into P"

    @pytest.mark.parametrize(
        ("d_tp", "p_tp", "heads", "factors"),
        [
            (4, 2, 8, [0, 1, 0, 1]),
            (4, 1, 8, [0, 1, 2, 3]),
            (8, 2, 4, [0, 0, 1, 1, 0, 0, 1, 1]),
            (4, 4, 4, [0, 0, 0, 0]),
            (2, 4, 4, [0, 0]),
        ],
    )
    def test_the_rank_offset_factor_is_where_the_heads_begin_on_p_in_units_of_ds_own(
        self, d_tp: int, p_tp: int, heads: int, factors: list[int]
    ) -> None:
        found = []
        for plan in plans(d_tp, p_tp, heads):
            starts = {item.remote_heads.start for route in plan.routes for item in route.slices}
            own = len(heads_of(d_tp, heads, plan.worker))
            found.append(starts.pop() // own)
            assert not starts
        assert found == factors

    def test_mla_reads_one_rank_and_no_offset(self) -> None:
        for plan in plans(2, 4, model="mla"):
            reading = [route for route in plan.routes if route.slices]
            assert len(reading) == 1
            assert {(item.local_heads, item.remote_heads) for item in reading[0].slices} == {(Range(0, 1), Range(0, 1))}

    def test_sizes_that_do_not_divide_have_source_ranks_and_offsets_of_their_own(self) -> None:
        found = [
            [(route.worker, route.slices[0].remote_heads, route.slices[0].local_heads) for route in plan.routes]
            for plan in plans(3, 2, heads=6)
        ]
        assert found == [
            [(0, Range(0, 2), Range(0, 2))],
            [(0, Range(2, 3), Range(0, 1)), (1, Range(0, 1), Range(1, 2))],
            [(1, Range(1, 3), Range(0, 2))],
        ]


class TestTPTransferSlice:
    """`remote_rank`, `global_range`, `local_range`, `remote_range`, and what its review asked for."""

    @pytest.mark.parametrize(("d_tp", "p_tp", "heads"), [(2, 3, 6), (3, 2, 6), (4, 6, 12), (2, 3, 5), (8, 3, 5)])
    def test_the_three_ranges_are_one_in_three_countings_and_together_everything(
        self, d_tp: int, p_tp: int, heads: int
    ) -> None:
        for plan in plans(d_tp, p_tp, heads):
            covered: Counter[tuple[tuple[str, str], int]] = Counter()
            for route in plan.routes:
                for item in route.slices:
                    assert len(item.heads) == len(item.local_heads) == len(item.remote_heads) > 0
                    assert item.local.heads.start + item.local_heads.start == item.heads.start
                    assert item.remote.heads.start + item.remote_heads.start == item.heads.start
                    assert item.remote_heads.stop <= len(item.remote.heads)
                    covered.update((item.local.name, head) for head in range(item.heads.start, item.heads.stop))
            own = {head for route in plan.routes for item in route.slices for head in _range(item.local.heads)}
            assert {head for _, head in covered} == own
            assert set(covered.values()) == {1}

    def test_the_partition_is_robust_where_sizes_do_not_divide(self) -> None:
        """Five heads: [0, 3) and [3, 5) on P; [0, 2), [2, 4) and [4, 5) on D."""
        ranges = [[(route.worker, route.slices[0].heads) for route in plan.routes] for plan in plans(3, 2, heads=5)]
        assert ranges == [
            [(0, Range(0, 2))],
            [(0, Range(2, 3)), (1, Range(3, 4))],
            [(1, Range(4, 5))],
        ]

    def test_a_rank_that_holds_no_head_is_skipped_but_notified(self) -> None:
        """Three ranks of two heads each by rounding up: the last one has none of four."""
        producer = sharded(tp=3)
        held = [Range(0, 2), Range(2, 4), Range(4, 4)]
        workers = tuple(
            _with_heads(of, heads) for of, heads in zip(sharded(tp=2).workers + producer.workers[2:], held, strict=True)
        )
        ceiled = _with_workers(producer, workers)
        plan = plan_transfer(sharded("D"), 0, ceiled)
        assert [(route.worker, bool(route.slices), route.expected) for route in plan.routes] == [
            (0, True, 1),
            (1, True, 1),
            (2, False, 1),
        ]
        back = plan_engine(_with_workers(sharded("D", tp=3), workers), sharded())
        assert [bool(plan.routes) for plan in back] == [True, True, False], "nor does it read anything"

    @pytest.mark.parametrize(
        ("d_tp", "p_tp", "heads", "readers"),
        [(4, 2, 1, [2, 2]), (8, 4, 2, [2, 2, 2, 2]), (6, 4, 2, [2, 1, 2, 1]), (4, 3, 1, [2, 1, 1])],
    )
    def test_replicas_are_balanced(self, d_tp: int, p_tp: int, heads: int, readers: list[int]) -> None:
        """Ranks that hold the same head serve equally many readers, or one more."""
        served = Counter(route.worker for plan in plans(d_tp, p_tp, heads) for route in plan.routes if route.slices)
        assert [served[rank] for rank in range(p_tp)] == readers


class TestHeteroTPTransferConfig:
    """Split handles, `fa_head_slot`, `fa_rank_offset`, `should_skip_fa`, `fa_entry_size`, `transfer_targets`."""

    def test_split_handles_are_the_local_block_in_chunks_one_per_source_rank(self) -> None:
        """Attention in halves of a block, states in halves of every sub-projection: TP 1 from TP 2."""
        (plan,) = plans(1, 2, heads=2, layers=1, model="hybrid")
        blocks = [[3], [5]], [[1], [2]]
        attention, state = _tensor(plan, "k"), _tensor(plan, "ssm")
        block = attention.base + 3 * attention.block_stride
        chunk = attention.block_stride // 2
        page = _tensor(plan, "conv.x").base + 5 * state.block_stride
        writes = [written(plan, route, *blocks) for route in plan.routes]
        for index, of_rank in enumerate(writes):
            assert (block + index * chunk, chunk) in of_rank
            assert (page + index * 48, 48) in of_rank, "x: 8 of 16 channels of 6 bytes"
            assert (page + 96 + index * 24, 24) in of_rank, "B"
            assert (page + 144 + index * 24, 24) in of_rank, "C"
            assert (page + 192 + index * 64, 64) in of_rank, "the temporal state: 2 of 4 heads"
            assert len(of_rank) == 5

    def test_attention_and_states_are_split_by_factors_of_their_own(self) -> None:
        """One KV head on two ranks: attention comes whole from one, states in halves from both."""
        (plan,) = plans(1, 2, heads=1, layers=1, model="hybrid")
        attention, ssm = _tensor(plan, "k"), _tensor(plan, "ssm")
        first, second = (written(plan, route, [[3], [5]], [[1], [2]]) for route in plan.routes)
        assert (attention.base + 3 * attention.block_stride, attention.block_stride) in first
        assert len(first) == len(second) + 1
        for index, of_rank in enumerate((first, second)):
            assert (ssm.base + 5 * ssm.block_stride + index * 64, 64) in of_rank

    def test_ranks_that_carry_only_state_move_nothing_of_attention(self) -> None:
        """Two heads on eight ranks: `should_skip_fa` of three ranks in four."""
        for plan in plans(2, 8, heads=2, model="hybrid"):
            carries = [sorted({item.tokens.group for item in route.slices}) for route in plan.routes]
            assert carries == [[0, 1], [1], [1], [1]]
            for route in plan.routes[1:]:
                for address, length in written(plan, route, [[3], [5]], [[1], [2]]):
                    assert any(_holds(item.local, address, length) for item in of_group(route, 1))

    @pytest.mark.parametrize(("d_tp", "p_tp", "heads"), [(1, 2, 4), (4, 2, 4), (2, 8, 4), (8, 2, 4), (2, 8, 2)])
    def test_the_entry_size_is_the_smaller_sides_block_and_equal_here_and_there(
        self, d_tp: int, p_tp: int, heads: int
    ) -> None:
        sizes = [len(heads_of(tp, heads, 0)) * BLOCK_TOKENS * TOKEN_BYTES for tp in (d_tp, p_tp)]
        for plan in plans(d_tp, p_tp, heads):
            for route in plan.routes:
                for table in route_tables(route, 0, 0):
                    assert {int(row[1]) for row in table.local_rows} == {min(sizes)}
                    assert {int(row[1]) for row in table.remote_rows} == {min(sizes)}

    @pytest.mark.parametrize(("d_tp", "p_tp", "heads"), [(4, 2, 8), (4, 1, 4), (8, 2, 4), (8, 1, 2), (2, 2, 4)])
    def test_the_rank_offset_is_the_byte_at_which_ds_heads_begin_in_ps_block(
        self, d_tp: int, p_tp: int, heads: int
    ) -> None:
        for plan in plans(d_tp, p_tp, heads, layers=1):
            (route,) = (route for route in plan.routes if route.slices)
            (table,) = route_tables(route, 0, 0)
            base = route.slices[0].remote.base
            first = heads_of(d_tp, heads, plan.worker).start - heads_of(p_tp, heads, route.worker).start
            assert int(table.remote_rows[0, 0]) - base == first * BLOCK_TOKENS * TOKEN_BYTES


class TestMambaEngineTransferInfo:
    """Ranks that carry attention, ranks that carry state, and the sub-projections of a convolution state."""

    def test_the_numbers_of_reads_of_attention_and_of_states(self) -> None:
        (plan,) = plans(1, 4, heads=2, model="hybrid")
        assert (len(sources(plan, 0)), len(sources(plan, 1))) == (2, 4)
        for plan in plans(4, 2, heads=2, model="hybrid"):
            assert len(sources(plan, 0)) == len(sources(plan, 1)) == 1

    def test_sub_projections_from_four_ranks_to_two(self) -> None:
        """P's page: x 4 channels, B 2, C 2, one temporal head. D's: twice that; each P rank fills half of each part."""
        ranks: list[list[tuple[str, int, int, int]]] = []
        for plan in plans(2, 4, layers=1, model="state"):
            ranks += [_parts(route) for route in plan.routes]
        x, b = 4 * CONV_CELL_BYTES, 2 * CONV_CELL_BYTES
        halves = [
            [
                ("conv.x", half * x, 0, x),
                ("conv.B", 2 * x + half * b, x, b),
                ("conv.C", 2 * x + 2 * b + half * b, x + b, b),
                ("ssm", 2 * x + 4 * b + half * STATE_HEAD_BYTES, x + 2 * b, STATE_HEAD_BYTES),
            ]
            for half in range(2)
        ]
        assert ranks == [*halves, *halves]

    def test_sub_projections_from_two_ranks_to_four(self) -> None:
        """The other way round: D reads its half of each part from the middle of P's page."""
        x, b = 4 * CONV_CELL_BYTES, 2 * CONV_CELL_BYTES
        for plan in plans(4, 2, layers=1, model="state"):
            (route,) = plan.routes
            half = plan.worker % 2
            assert route.worker == plan.worker // 2
            assert _parts(route) == [
                ("conv.x", 0, half * x, x),
                ("conv.B", x, 2 * x + half * b, b),
                ("conv.C", x + b, 2 * x + 2 * b + half * b, b),
                ("ssm", x + 2 * b, 2 * x + 4 * b + half * STATE_HEAD_BYTES, STATE_HEAD_BYTES),
            ]

    def test_sub_projections_from_two_ranks_to_three(self) -> None:
        """No ratio, and no part that divides: every channel is read once all the same."""
        channels: Counter[tuple[str, int]] = Counter()
        for plan in plans(3, 2, layers=1, model="state"):
            for route in plan.routes:
                channels.update((item.local.kind, head) for item in route.slices for head in _range(item.heads))
        assert set(channels.values()) == {1}
        assert Counter(kind for kind, _ in channels) == {"conv.x": 16, "conv.B": 8, "conv.C": 8, "ssm": 4}


class TestTransferTopology:
    """`tp_ratio`, `block_size_ratio`, replication, target ranks, DCP, registration."""

    @pytest.mark.parametrize(("d_tp", "p_tp", "ratio"), [(4, 2, 2), (2, 2, 1), (2, 4, -2), (1, 4, -4)])
    def test_tp_ratio_is_the_readers_of_a_rank_or_the_ranks_of_a_reader(self, d_tp: int, p_tp: int, ratio: int) -> None:
        for plan in plans(d_tp, p_tp, heads=4):
            assert {route.expected for route in plan.routes} == {max(1, ratio)}
            assert len(plan.routes) == max(1, -ratio)

    @pytest.mark.parametrize(("here", "there"), [(16, 16), (64, 16), (16, 64), (48, 16), (24, 16)])
    def test_block_size_ratio_is_the_units_of_a_block_and_either_side_may_be_the_smaller(
        self, here: int, there: int
    ) -> None:
        consumer, producer = sharded("D", block_tokens=here), sharded(block_tokens=there)
        (route,) = plan_transfer(consumer, 0, producer).routes
        (tokens,) = {item.tokens for item in route.slices}
        units = tokens.positions(tokens.local), tokens.positions(tokens.remote)
        assert units[0] * there == units[1] * here, "the ratio of the sizes, in lowest terms"
        assert min(units) == 1 or (here % there and there % here)

    @pytest.mark.parametrize(("p_tp", "heads", "model"), [(4, 2, "attention"), (8, 2, "attention"), (4, 4, "mla")])
    def test_a_replicated_cache_is_read_once_and_every_replica_is_released(
        self, p_tp: int, heads: int, model: str
    ) -> None:
        (plan,) = plans(1, p_tp, heads, model=model)
        read = [route.worker for route in plan.routes if route.slices]
        assert len(read) == (1 if model == "mla" else heads)
        assert sorted(route.worker for route in plan.routes) == list(range(p_tp))

    @pytest.mark.parametrize(
        ("d_dcp", "p_dcp", "ranks", "readers"),
        [
            (1, 4, [[0, 1, 2, 3]], 1),
            (2, 4, [[0, 2], [1, 3]], 1),
            (4, 2, [[0], [1], [0], [1]], 2),
            (2, 2, [[0], [1]], 1),
            (2, 1, [[0], [0]], 2),
        ],
    )
    def test_the_ranks_whose_tokens_overlap_and_how_many_read_each(
        self, d_dcp: int, p_dcp: int, ranks: list[list[int]], readers: int
    ) -> None:
        """`dcp_source_ranks` and `dcp_consumer_count`: DCP for MLA, every rank a share of the tokens."""
        consumer = sharded("D", tp=d_dcp, dcp=d_dcp, model="mla")
        found = plan_engine(consumer, sharded(tp=p_dcp, dcp=p_dcp, model="mla"))
        assert [[route.worker for route in plan.routes] for plan in found] == ranks
        assert {route.expected for plan in found for route in plan.routes} == {readers}

    def test_every_reader_of_a_replicated_consumer_reads_every_share(self) -> None:
        found = plan_engine(sharded("D", tp=2, model="mla"), sharded(tp=4, dcp=4, model="mla"))
        assert [[route.worker for route in plan.routes] for plan in found] == [[0, 1, 2, 3]] * 2
        assert {route.expected for plan in found for route in plan.routes} == {2}

    def test_registering_an_engine_again_gives_the_same_plan(self) -> None:
        """After a restart, from another message, and from the plan that was kept of the engine before it.

        A worker connects to an engine once, and never to itself: is in tests/worker/engines/test_earlier_designs.py.
        """
        consumer, producer = sharded("D", tp=2, model="hybrid"), sharded(tp=4, model="hybrid")
        message = msgspec.msgpack.encode(other(producer, boot="1" * 32))
        again = msgspec.msgpack.decode(message, type=EngineDescription)
        expected = plan_engine(consumer, producer)
        assert plan_engine(consumer, again) == expected
        for worker_index, plan in enumerate(expected):
            cache = PlanCache(consumer, worker_index)
            assert cache.plan(producer) == cache.plan(again) == plan
        moved = [worker([other(x, base=x.base + 64) for x in one.tensors], one.place) for one in again.workers]
        assert plan_engine(consumer, other(again, workers=tuple(moved))) != expected

    @pytest.mark.parametrize("model", ["attention", "mla", "hybrid", "state"])
    @pytest.mark.parametrize(("d_tp", "p_tp"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2)])
    def test_one_describe_for_every_kind_of_model(self, model: str, d_tp: int, p_tp: int) -> None:
        """One line that names the producer, this worker, and everybody it reads from or releases."""
        for plan in plans(d_tp, p_tp, model=model):
            reported = plan.describe()
            assert reported.startswith(f"plan producer=P tp{plan.worker} ")
            assert "\n" not in reported
            for route in plan.routes:
                assert f"{'reads' if route.slices else 'releases'} {route.place}" in reported
            assert reported.count("B/token") == sum(bool(route.slices) for route in plan.routes)
            has_state = any(item.tokens.is_state for route in plan.routes for item in route.slices)
            assert ("B/request" in reported) == has_state


def written(plan: TransferPlan, route: Route, local: list[list[int]], remote: list[list[int]]) -> set[tuple[int, int]]:
    """`(address, length)` of everything that a route writes for a request of one block a group."""
    groups = sharded(model="hybrid").groups
    request = RequestBlocks(local, remote, 0, BLOCK_TOKENS, BLOCK_TOKENS)
    units = pair_request(plan, groups, groups, request)
    return {
        (address, length)
        for copies in route_copies(route, units)
        for address, length in zip(copies.dst.tolist(), copies.num_bytes.tolist(), strict=True)
    }


def _range(heads: Range) -> range:
    return range(heads.start, heads.stop)


def _tensor(plan: TransferPlan, kind: str) -> PagedTensor:
    return next(item.local for route in plan.routes for item in route.slices if item.local.kind == kind)


def _holds(tensor: PagedTensor, address: int, length: int) -> bool:
    end = tensor.base + tensor.blocks * tensor.block_stride
    return tensor.base <= address and address + length <= end


def _parts(route: Route) -> list[tuple[str, int, int, int]]:
    """Per sub-projection where it begins in D's page and in P's, and its bytes."""
    here = min(item.local.base for item in route.slices)
    there = min(item.remote.base for item in route.slices)
    return [
        (
            item.local.kind,
            item.local.base + item.local_heads.start * item.local.head_stride - here,
            item.remote.base + item.remote_heads.start * item.remote.head_stride - there,
            item.state_bytes,
        )
        for item in route.slices
    ]


def _with_heads(of: WorkerDescription, heads: Range) -> WorkerDescription:
    return worker([other(tensor, heads=heads) for tensor in of.tensors], of.place)


def _with_workers(engine: EngineDescription, workers: Sequence[WorkerDescription]) -> EngineDescription:
    """The engine with these caches in its own places."""
    placed = [worker(of.tensors, own.place) for of, own in zip(workers, engine.workers, strict=True)]
    changed: EngineDescription = other(engine, workers=tuple(placed))
    return changed
