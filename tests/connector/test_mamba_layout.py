"""Recurrent states: kvferry's description of a page, compared with the views through which vLLM's layers access it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.mamba_layout import groups_of_heads
from kvferry.connector.layout.sharding import Sharding
from kvferry.plan.blocks import RequestBlocks
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup
from tests.connector.caches import all_bytes_of, config_of, group, storage_of, views_of
from tests.connector.moves import move_by_plan
from tests.connector.state_models import STATE_MODELS, StateModel, orient, read, write
from tests.plan.samples import engine, worker

every_model = pytest.mark.parametrize("model", STATE_MODELS.values(), ids=STATE_MODELS.keys())
LAYERS = ("mixer.0", "mixer.1")


@pytest.fixture(params=["DS", "SD"])
def orientation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a channel's columns, or a column's channels, lie together."""
    orient(monkeypatch, request.param)
    return str(request.param)


class Engine:
    """The caches of all ranks of one engine."""

    def __init__(self, model: StateModel, tp: int, layout: str = "LBHNC", num_blocks: int = 5, **changed: Any) -> None:
        self.model, self.tp = model, tp
        self.spec = model.spec(tp, **changed)
        self.config = config_of(group(self.spec, *LAYERS), layout=layout, num_blocks=num_blocks)
        self.views = [views_of(self.config, layout) for _ in range(tp)]
        self.caches = [
            discover(views, self.config, {}, Sharding(2, rank, tp), head_groups=model.head_groups)
            for rank, views in enumerate(self.views)
        ]
        workers = [worker(found.tensors, Place(tp=rank)) for rank, found in enumerate(self.caches)]
        self.description = engine(workers=workers, topology=Topology(tp=tp), groups=groups_of(self.config))

    def write(self, block: int, seed: int) -> None:
        for rank, views in enumerate(self.views):
            for index, layer in enumerate(LAYERS):
                write(self.spec, views[layer], block, self.model.draw(seed + index).on_rank(rank, self.tp))

    def check(self, block: int, seed: int) -> None:
        """Check that every rank has its part of the states."""
        for rank, views in enumerate(self.views):
            for index, layer in enumerate(LAYERS):
                expected = self.model.draw(seed + index).on_rank(rank, self.tp)
                for found, right in zip(read(self.spec, views[layer], block, expected), expected, strict=True):
                    assert torch.equal(found, right), f"rank {rank} of {self.tp}, {layer}"


def move(source: Engine, target: Engine, theirs: int, ours: int) -> int:
    """Carry out the workers' plan, with memmove in place of NIXL. Returns the bytes that moved."""
    consumer, producer = target.description, source.description
    request = RequestBlocks([[ours]], [[theirs]], first_token=0, stop_token=40, num_tokens=40)
    return move_by_plan(consumer, producer, request)


@every_model
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_cells_of_a_page_are_its_states_and_nothing_of_its_padding(
    model: StateModel, tp: int, layout: str, orientation: str
) -> None:
    one = Engine(model, tp, layout, page_size_padded=8192)
    for views, found in zip(one.views, one.caches, strict=True):
        for layer, view in views.items():
            mine = [tensor for tensor in found.tensors if tensor.layer == layer]
            assert [tensor.kind for tensor in mine] == [*model.projections, *(["ssm"] if model.temporal else [])]
            reported = sorted(byte for tensor in mine for byte in all_bytes_of(tensor))
            start, stride = view.data_ptr(), view.stride(0)
            size = one.spec.state_content_size_bytes
            assert reported == [start + block * stride + byte for block in range(5) for byte in range(size)]
            assert stride == (8192 if layout == "LBHNC" else 2 * 8192)
        (region,) = found.regions()
        assert region.address == storage_of(views[LAYERS[0]]).data_ptr()
    assert groups_of(one.config) == (CacheGroup(policy="state", block_tokens=512),)


@every_model
@pytest.mark.parametrize(("producer", "consumer"), [(4, 2), (2, 4), (1, 2), (2, 1), (4, 1)])
def test_states_arrive_right_per_projection_whatever_the_ranks(
    model: StateModel, producer: int, consumer: int, orientation: str
) -> None:
    source, target = Engine(model, producer), Engine(model, consumer, num_blocks=7)
    source.write(3, seed=11)
    before = [storage_of(views[LAYERS[0]]).clone() for views in target.views]
    moved = move(source, target, theirs=3, ours=5)
    target.check(5, seed=11)
    assert moved == len(LAYERS) * consumer * target.spec.state_content_size_bytes
    for views, old in zip(target.views, before, strict=True):
        for layer in LAYERS:  # nothing but the block has changed
            page, start = target.spec.page_size_bytes, views[layer].data_ptr() - storage_of(views[layer]).data_ptr()
            old[start + 5 * page : start + 6 * page] = storage_of(views[layer])[start + 5 * page : start + 6 * page]
        assert torch.equal(storage_of(views[LAYERS[0]]), old)


@pytest.mark.parametrize("name", ["Mamba-2", "gated delta net"])
@pytest.mark.parametrize("layouts", [("DS", "SD"), ("SD", "DS")])
def test_engines_of_the_two_orientations_are_paired(
    name: str, layouts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    for tp, layout in zip((2, 1), layouts, strict=True):
        orient(monkeypatch, layout)
        engines.append(Engine(STATE_MODELS[name], tp))
    source, target = engines
    source.write(1, seed=5)
    move(source, target, theirs=1, ours=2)
    target.check(2, seed=5)


@pytest.mark.parametrize("name", ["Mamba-2", "Mamba-2, one group"])
def test_a_single_group_on_a_rank_that_may_be_any_is_paired_with_equal_ranks_only(name: str, orientation: str) -> None:
    """It is the rank's own or a copy of the only one: kvferry does not guess."""
    model = replace(STATE_MODELS[name], head_groups=None)
    source, target = Engine(model, 4), Engine(model, 4)
    source.write(1, seed=3)
    move(source, target, theirs=1, ours=2)
    target.check(2, seed=3)
    with pytest.raises(PlanRefused) as refused:
        plan_engine(Engine(model, 1).description, source.description)
    assert {reason.field for reason in refused.value.reasons} == {
        f"{layer}/{kind}.format" for layer in LAYERS for kind in ("conv.B", "conv.C")
    }


def test_copies_of_the_only_group_are_read_from_the_ranks_in_turn(orientation: str) -> None:
    model = STATE_MODELS["Mamba-2, one group"]
    source, target = Engine(model, 4), Engine(model, 2)
    held = [tensor.heads for found in source.caches for tensor in found.tensors if tensor.kind == "conv.B"]
    assert held == [Range(0, 12)] * 8
    read_from = {
        route.place.tp
        for plan in plan_engine(target.description, source.description)
        for route in plan.routes
        for item in route.slices
        if item.local.kind == "conv.B"
    }
    assert len(read_from) == 2


def test_a_state_that_every_rank_has_whole_is_one_that_everybody_holds(orientation: str) -> None:
    for name, heads in (("short convolution", 64), ("linear attention", 8)):
        config = config_of(group(STATE_MODELS[name].spec(1, tp_replicated=True), *LAYERS))
        for rank in (0, 3):
            found = discover(views_of(config), config, {}, Sharding(8, rank, 4))
            assert {tensor.heads for tensor in found.tensors} == {Range(0, heads)}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mamba_type": MambaAttentionBackendEnum.CUSTOM}, "is 'a state of CUSTOM'; expected a state of one of MAMBA1"),
        (
            {"shapes": ((152, 3), (8, 16, 12), (8, 4, 16)), "dtypes": (torch.bfloat16,) * 3},
            "is '3 states'; expected 2 of MAMBA2: rings and records",
        ),
        (
            {"shapes": ((153, 3), (8, 16, 12))},
            ".* channels of a convolution'; expected 128 and two equal projections more",
        ),
        (
            {"shapes": ((128, 3), (8, 16, 12))},
            ".* channels of a convolution'; expected 128 and two equal projections more",
        ),
    ],
)
def test_states_that_are_not_known_are_refused_by_layer(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orient(monkeypatch, "DS")
    config = config_of(group(STATE_MODELS["Mamba-2"].spec(1, **changed), "mixer.7"))
    with pytest.raises(InvalidConfig, match=rf"cache of layer mixer\.7 {says}"):
        discover(views_of(config), config, {}, Sharding(2, 0, 1))


def test_a_page_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    orient(monkeypatch, "DS")
    config = config_of(group(STATE_MODELS["Mamba-1"].spec(1), "mixer.7"))
    views = {layer: view[..., :-8] for layer, view in views_of(config).items()}
    with pytest.raises(InvalidConfig, match=r"mixer\.7 .*expected a view of bytes \[5, 1, 1, 1920\]"):
        discover(views, config, {}, Sharding(2, 0, 1))


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"mamba_n_groups": 8}, 8),
        ({"n_groups": 1, "n_group": 4}, 1),
        ({"mamba_ngroups": 2, "mamba_n_groups": 2}, 2),
        ({"mamba_ngroups": 2, "n_groups": 4}, None),
        ({"n_groups": None}, None),
        ({}, None),
    ],
)
def test_the_groups_of_heads_are_what_the_configuration_says(config: dict[str, Any], reported: int | None) -> None:
    assert groups_of_heads(config) == reported
