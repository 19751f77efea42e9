"""An engine of a recorded model: its caches, and sequences in them as the model's layers write and read them.

What a rank holds, where it is and which blocks a request has is said here without kvferry: by vLLM's views, by its
managers' rule of which tokens are skipped, and by the definition of a GPU's rows `[k | v]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.sharding import Sharding
from kvferry.protocol.geometry import Place, Topology
from kvferry.worker.caches import KvCaches
from tests.connector.caches import configs_for, layout_of_packing, storage_of, views_of
from tests.connector.recorded import HEADS, Recorded, Specs
from tests.connector.state_models import read, write

MANAGERS = {
    SlidingWindowSpec: SlidingWindowManager,
    SlidingWindowMLASpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
}
NULL_BLOCK = 0


@dataclass(frozen=True)
class Tokens:
    """A request's tokens in one engine.

    Attributes:
        blocks: per cache group, from the first token on, null blocks where vLLM has given them back; behind them the
            scratch blocks of drafts.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Worker:
    """One rank of a stage."""

    place: Place
    config: Any
    views: dict[str, torch.Tensor]
    caches: KvCaches


class RecordedEngine:
    """All workers of one engine."""

    def __init__(
        self,
        model: Recorded,
        tp: int = 1,
        *,
        layout: str = "LBHNC",
        pp: int = 1,
        num_blocks: int = 40,
        packing: str = "gpu_rows",
        kernel_tokens: int | None = None,
    ) -> None:
        self.model, self.topology = model, Topology(tp=tp, pp=pp)
        whole = model.specs(tp)
        size = -(-len(whole) // pp)
        names = [list(whole)[at : at + size] for at in range(0, len(whole), size)]
        stages: list[Specs] = [{name: whole[name] for name in stage} for stage in names]
        self.configs = configs_for(stages, layout, num_blocks)
        self.groups = groups_of(self.configs[0])
        states = next(iter(model.states.values()), None)
        self.workers = []
        for stage, config in enumerate(self.configs):
            for rank in range(tp):
                views = views_of(
                    config, layout, kernel_block_sizes=_kernels(config, kernel_tokens)
                )
                block_layouts = {
                    name: layout_of_packing(model.packings.get(name, packing))
                    for name in views
                }
                sharding = Sharding(total_heads=HEADS, rank=rank, size=tp)
                head_groups = states.head_groups if states is not None else None
                caches = discover(
                    views, config, block_layouts, sharding, head_groups=head_groups
                )
                self.workers.append(
                    Worker(Place(pp=stage, tp=rank), config, views, caches)
                )

    def place_sequence(self, num_tokens: int, free: Sequence[int]) -> Tokens:
        """Give a sequence blocks, as vLLM has left them when so many tokens are computed."""
        ids, found = iter(free), []
        for spec in _group_specs(self.configs[0]):
            count, skipped = (
                -(-num_tokens // spec.block_size),
                skipped_tokens(spec, num_tokens) // spec.block_size,
            )
            scratch = spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0
            found.append(
                (NULL_BLOCK,) * skipped
                + tuple(next(ids) for _ in range(count - skipped + scratch))
            )
        return Tokens(num_tokens, tuple(found))

    def reported(self, tokens: Tokens) -> tuple[tuple[int, ...], ...]:
        """Its blocks as the scheduler side passes them on."""
        local: Any = SimpleNamespace(
            groups=self.groups,
            block_spans=[group.block_tokens for group in self.groups],
        )
        return tuple(
            map(
                tuple,
                LocalEngine.without_scratch(local, tokens.blocks, tokens.num_tokens),
            )
        )

    def write(self, tokens: Tokens, seed: int) -> None:
        """Write as the model's layers do: keys and values of all tokens that have a block, and the last state."""
        for worker, layer, spec, ids in self._layers(tokens):
            if isinstance(spec, MambaSpec):
                write(
                    spec,
                    worker.views[layer],
                    *self._state(worker, layer, spec, ids, tokens, seed),
                )
                continue
            values = self._values(worker, layer, tokens.num_tokens, seed)
            for token in range(tokens.num_tokens):
                if ids[token // spec.block_size] != NULL_BLOCK:
                    self._token(worker, layer, spec, ids, token).copy_(values[token])

    def check(self, tokens: Tokens, seed: int) -> None:
        """Check that every layer has all that it needs to continue.

        Raises:
            AssertionError: naming the worker, the layer and the token.
        """
        for worker, layer, spec, ids in self._layers(tokens):
            where = f"{worker.place}, {layer}"
            if isinstance(spec, MambaSpec):
                block, expected = self._state(worker, layer, spec, ids, tokens, seed)
                for found, right in zip(
                    read(spec, worker.views[layer], block, expected),
                    expected,
                    strict=True,
                ):
                    assert torch.equal(found, right), where
                continue
            values = self._values(worker, layer, tokens.num_tokens, seed)
            for token in range(
                skipped_tokens(spec, tokens.num_tokens), tokens.num_tokens
            ):
                found = self._token(worker, layer, spec, ids, token)
                assert torch.equal(found, values[token]), f"{where}, token {token}"

    def loaded_bytes(self, tokens: Tokens) -> Iterator[tuple[Worker, torch.Tensor]]:
        """By worker, a mask of the bytes of the allocation that are in the sequence's blocks, bool."""
        for worker in self.workers:
            mask = torch.zeros_like(
                storage_of(next(iter(worker.views.values()))), dtype=torch.bool
            )
            for at, layer, _, ids in self._layers(tokens):
                if at is not worker:
                    continue
                view = worker.views[layer]
                item, ratio = (
                    view.element_size(),
                    view.shape[0] // worker.config.num_blocks,
                )
                shape = (*view.shape[:3], view.shape[3] * item)
                strides = (*(stride * item for stride in view.stride()[:3]), 1)
                bytes_ = mask.as_strided(shape, strides, view.storage_offset() * item)
                for block in ids:
                    if block != NULL_BLOCK:
                        bytes_[block * ratio : (block + 1) * ratio] = True
            yield worker, mask

    def _state(
        self,
        worker: Worker,
        layer: str,
        spec: Any,
        ids: Sequence[int],
        tokens: Tokens,
        seed: int,
    ) -> tuple[int, tuple[torch.Tensor, ...]]:
        """The block of the state after the last token, and a rank's part of that state."""
        states = (
            self.model.states[layer]
            .draw(_seed(seed, layer))
            .on_rank(worker.place.tp, self.topology.tp)
        )
        return ids[-(-tokens.num_tokens // spec.block_size) - 1], states

    def _token(
        self, worker: Worker, layer: str, spec: Any, ids: Sequence[int], token: int
    ) -> torch.Tensor:
        """The row of every head of a token, `[H, C]`."""
        view = worker.views[layer]
        ratio = view.shape[0] // worker.config.num_blocks
        block, inside = ids[token // spec.block_size], token % spec.block_size
        return view[block * ratio + inside // view.shape[2], :, inside % view.shape[2]]

    def _values(
        self, worker: Worker, layer: str, num_tokens: int, seed: int
    ) -> torch.Tensor:
        """A rank's part of a layer's tokens, `[tokens, H, C]`: its heads of the whole model."""
        view = worker.views[layer]
        latent = layer in self.model.packings
        heads = 1 if latent else HEADS
        draw = torch.Generator().manual_seed(_seed(seed, layer))
        whole = torch.randint(0, 100, (512, heads, view.shape[3]), generator=draw)[
            :num_tokens
        ].to(view.dtype)
        tp, rank = self.topology.tp, worker.place.tp
        if latent:
            return whole
        return (
            whole.chunk(tp, dim=1)[rank]
            if heads >= tp
            else whole[:, rank * heads // tp, None]
        )

    def _layers(
        self, tokens: Tokens
    ) -> Iterator[tuple[Worker, str, Any, tuple[int, ...]]]:
        for worker in self.workers:
            for group, ids in zip(
                worker.config.kv_cache_groups, tokens.blocks, strict=True
            ):
                for layer in group.layer_names:
                    yield worker, layer, _layer_spec(group.kv_cache_spec, layer), ids


def skipped_tokens(spec: Any, num_tokens: int) -> int:
    """The number of a sequence's first tokens that vLLM does not keep."""
    manager = MANAGERS.get(type(spec))
    if manager is None:
        return 0
    words = ("sliding_window", "extra_retained_tokens", "attention_chunk_size")
    stub: Any = SimpleNamespace(**{word: getattr(spec, word, 0) for word in words})
    return int(manager.get_num_skipped_tokens(stub, num_tokens))


def _group_specs(config: Any) -> list[Any]:
    return [_layer_spec(group.kv_cache_spec, None) for group in config.kv_cache_groups]


def _layer_spec(spec: Any, layer: str | None) -> Any:
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return spec.first_spec if layer is None else spec.kv_cache_specs[layer]


def _kernels(config: Any, tokens: int | None) -> list[int] | None:
    """Kernel block sizes: attention's blocks are divided, a state's are not."""
    if tokens is None:
        return None
    return [
        spec.block_size if isinstance(spec, MambaSpec) else tokens
        for spec in _group_specs(config)
    ]


def _seed(seed: int, layer: str) -> int:
    return seed * 1000 + sum(layer.encode()) % 997
