"""Layers with recurrent states as vLLM shapes, shards and views them: the oracle for kvferry's description of them.

Shapes and dtypes come from vLLM's calculators, what a rank has of a convolution from its weight loader, and states are
written and read through the views that a layer binds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator as Shapes,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import MambaSpec

CONV_DTYPE, TEMPORAL_DTYPE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class StateModel:
    """A kind of layer.

    Attributes:
        shapes: of one rank of `tp`.
        projections: of the convolution, by kind: channels of the whole model, and whether every rank has all of them
            once there are several ranks.
        temporal: the temporal state of the whole model, heads first; empty without one.
        columns: of the convolution.
        head_groups: what the model's configuration says of B and C.
    """

    name: str
    kind: Any
    shapes: Callable[[int], Any]
    projections: dict[str, tuple[int, bool]]
    temporal: tuple[int, ...]
    columns: int = 3
    head_groups: int | None = None

    def spec(self, tp: int, **changed: Any) -> Any:
        """The spec that a layer of one rank gives to vLLM."""
        dtypes = ([CONV_DTYPE] if self.projections else []) + (
            [TEMPORAL_DTYPE] if self.temporal else []
        )
        usual = {"block_size": 512, "mamba_type": self.kind, "dtypes": tuple(dtypes)}
        return MambaSpec(**{"shapes": tuple(self.shapes(tp)), **usual, **changed})

    def draw(self, seed: int) -> Whole:
        """The states of a sequence in the whole model, every element different from its neighbours."""
        draw = torch.Generator().manual_seed(seed)
        conv = {
            kind: torch.randn(channels, self.columns, generator=draw).to(CONV_DTYPE)
            for kind, (channels, _) in self.projections.items()
        }
        return Whole(
            self,
            conv,
            torch.randn(self.temporal or (0,), generator=draw, dtype=TEMPORAL_DTYPE),
        )


@dataclass(frozen=True)
class Whole:
    """The states of one sequence, of all ranks together: `[channels, columns]` by projection, and the temporal one."""

    model: StateModel
    conv: dict[str, torch.Tensor]
    temporal: torch.Tensor

    def on_rank(self, rank: int, tp: int) -> tuple[torch.Tensor, ...]:
        """One rank's part of the states, the convolution as `[channels, columns]`."""
        found = []
        if self.conv:
            settings = []
            for channels, alike in self.model.projections.values():
                copies = tp if alike else 1
                settings.append((channels * copies, channels * (copies - 1), alike))
            whole = torch.cat(list(self.conv.values()))
            mine = torch.zeros(
                sum(setting[0] // tp for setting in settings),
                self.model.columns,
                dtype=whole.dtype,
            )
            mamba_v2_sharded_weight_loader(settings, tp, rank)(mine, whole)
            found.append(mine)
        if self.model.temporal:
            found.append(self.temporal.chunk(tp)[rank])
        return tuple(found)


def orient(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Keep convolution states by channel (`DS`) or by column (`SD`), as set by `VLLM_SSM_CONV_STATE_LAYOUT`."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)


def bound(spec: Any, view: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The views of a layer's states, `[B, …]` each, as the layer makes them of its page."""
    layer: Any = SimpleNamespace(
        get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
    )
    MambaBase.bind_kv_cache(layer, view)
    return tuple(layer.kv_cache)


def write(
    spec: Any, view: torch.Tensor, block: int, states: tuple[torch.Tensor, ...]
) -> None:
    """Write a rank's states into a block; a convolution in whichever orientation the spec has."""
    for place, state in zip(bound(spec, view), states, strict=True):
        place[block] = state if place[block].shape == state.shape else state.T


def read(
    spec: Any, view: torch.Tensor, block: int, like: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """A rank's states in a block, in the orientation of `like`."""
    found = (place[block] for place in bound(spec, view))
    return tuple(
        state if state.shape == other.shape else state.T
        for state, other in zip(found, like, strict=True)
    )


def _mamba2(n_groups: int) -> Callable[[int], Any]:
    return lambda tp: Shapes.mamba2_state_shape(tp, 8 * 16, n_groups, 8, 16, 12, 4)


STATE_MODELS = {
    model.name: model
    for model in (
        StateModel(
            "Mamba-1",
            Kinds.MAMBA1,
            lambda tp: Shapes.mamba1_state_shape(tp, 64, 6, 4),
            {"conv.x": (64, False)},
            (64, 6),
        ),
        StateModel(
            "Mamba-2",
            Kinds.MAMBA2,
            _mamba2(4),
            {"conv.x": (128, False), "conv.B": (48, False), "conv.C": (48, False)},
            (8, 16, 12),
            head_groups=4,
        ),
        StateModel(
            "Mamba-2, one group",
            Kinds.MAMBA2,
            _mamba2(1),
            {"conv.x": (128, False), "conv.B": (12, True), "conv.C": (12, True)},
            (8, 16, 12),
            head_groups=1,
        ),
        StateModel(
            "gated delta net",
            Kinds.GDN_ATTN,
            lambda tp: Shapes.gated_delta_net_state_shape(tp, 4, 8, 10, 6, 4),
            {"conv.q": (40, False), "conv.k": (40, False), "conv.v": (48, False)},
            (8, 6, 10),
        ),
        StateModel(
            "short convolution",
            Kinds.SHORT_CONV,
            lambda tp: Shapes.short_conv_state_shape(tp, 64, 4),
            {"conv.x": (64, False)},
            (),
        ),
        StateModel(
            "linear attention",
            Kinds.LINEAR,
            lambda tp: Shapes.linear_attention_state_shape(8, tp, 6),
            {},
            (8, 6, 6),
        ),
    )
}
