"""From two engines' descriptions to a transfer plan, or to all the reasons why there is none.

This version pairs equal shards: the same parallel sizes, heads, layers and block size on both sides. The strides may
differ. Anything else is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.refusal import PlanRefused, Reason
from kvferry.plan.runs import shared_runs
from kvferry.plan.transfer_plan import Route, Slice, TransferPlan
from kvferry.plan.validity import check_description
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import EngineDescription, WorkerDescription

_SAME_MODEL = {
    "fingerprint": "serve the same weights on both sides, or name them alike with model_fingerprint",
    "dtype": "start both engines with the same --dtype",
    "cache_dtype": "start both engines with the same --kv-cache-dtype",
    "quantization": "start both engines with the same --quantization",
    "speculative": "give both engines the same --speculative-config",
}
_SAME_SIZE = {
    "tp": ("tensor_parallel_size", "--tensor-parallel-size"),
    "pp": ("pipeline_parallel_size", "--pipeline-parallel-size"),
    "pcp": ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    "dcp": ("decode_context_parallel_size", "--decode-context-parallel-size"),
}
_MAX_TENSOR_REASONS = 8
_MAX_DESCRIPTORS = 1 << 31
"""Indices of descriptors are int32, in NIXL too."""


def plan_transfer(consumer: EngineDescription, worker: int, producer: EngineDescription) -> TransferPlan:
    """Plan what worker number `worker` of `consumer` reads from `producer`.

    Raises:
        PlanRefused: with every reason.
        InvalidMessage: the producer's description contradicts itself.
    """
    check_description(producer)
    reasons = [*_model_reasons(consumer, producer), *_size_reasons(consumer, producer)]
    reasons += _group_reasons(consumer, producer)
    here = consumer.workers[worker]
    found = [index for index, other in enumerate(producer.workers) if other.place == here.place]
    if not reasons and not found:
        reasons.append(Reason("workers", "none", str(here.place), "the producer did not describe this worker"))
    if reasons:
        raise PlanRefused(reasons)
    there = producer.workers[found[0]]
    reasons += _tensor_reasons(here, there)
    if reasons:
        raise PlanRefused(reasons)
    remote = {tensor.name: tensor for tensor in there.tensors}
    slices = tuple(
        Slice(tensor, remote[tensor.name], tensor.heads, shared_runs(tensor, remote[tensor.name]))
        for tensor in here.tensors
    )
    reasons += _descriptor_reasons(slices)
    if reasons:
        raise PlanRefused(reasons)
    route = Route(found[0], there.place, slices, expected=1)
    return TransferPlan(producer.engine_id, here.place, worker, (route,))


def _model_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    for field, change in _SAME_MODEL.items():
        theirs, ours = getattr(producer.facts, field), getattr(consumer.facts, field)
        if theirs != ours:
            yield Reason(f"model.{field}", repr(theirs), repr(ours), change)


def _size_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    for field, (name, option) in _SAME_SIZE.items():
        theirs, ours = getattr(producer.topology, field), getattr(consumer.topology, field)
        if theirs != ours:
            yield Reason(name, str(theirs), str(ours), f"give both engines the same {option}: this version needs it")


def _group_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    if len(producer.groups) != len(consumer.groups):
        change = "serve the same model with the same hybrid cache manager setting"
        yield Reason("cache_groups", str(len(producer.groups)), str(len(consumer.groups)), change)
        return
    for index, (theirs, ours) in enumerate(zip(producer.groups, consumer.groups, strict=True)):
        for field in ("policy", "window_tokens"):
            left, right = getattr(theirs, field), getattr(ours, field)
            if left != right:
                yield Reason(f"cache_groups[{index}].{field}", str(left), str(right), "serve the same model")


def _tensor_reasons(here: WorkerDescription, there: WorkerDescription) -> list[Reason]:
    ours = {tensor.name: tensor for tensor in here.tensors}
    theirs = {tensor.name: tensor for tensor in there.tensors}
    reasons = []
    for name in sorted(ours.keys() ^ theirs.keys()):
        left, right = ("absent", "present") if name in ours else ("present", "absent")
        reasons.append(Reason(f"tensor {'/'.join(name)}", left, right, "serve the same layers on both sides"))
    for name in sorted(ours.keys() & theirs.keys()):
        reasons += _differences(ours[name], theirs[name])
    if len(reasons) > _MAX_TENSOR_REASONS:
        more = len(reasons) - _MAX_TENSOR_REASONS
        reasons = [*reasons[:_MAX_TENSOR_REASONS], Reason("tensors", "…", "…", f"and {more} more differences")]
    return reasons


def _descriptor_reasons(slices: Sequence[Slice]) -> Iterator[Reason]:
    theirs = sum(len(item.runs) * item.remote.blocks for item in slices)
    ours = sum(len(item.runs) * item.local.blocks for item in slices)
    if max(theirs, ours) >= _MAX_DESCRIPTORS:
        yield Reason("descriptors", str(theirs), str(ours), "give both engines the same cache layout, or fewer blocks")


_SAME_TENSOR = {
    "group": "serve the same model",
    "heads": "give both engines the same --tensor-parallel-size: this version needs it",
    "block_tokens": "give both engines the same --block-size: this version needs it",
    "tile_tokens": "use the same attention backend on both sides",
    "cell_bytes": "use the same cache dtype and attention backend on both sides",
    "format": "use the same cache dtype and attention backend on both sides",
}


def _differences(local: PagedTensor, remote: PagedTensor) -> Iterator[Reason]:
    for field, change in _SAME_TENSOR.items():
        theirs, ours = getattr(remote, field), getattr(local, field)
        if theirs != ours:
            yield Reason(f"{local.layer}/{local.kind}.{field}", str(theirs), str(ours), change)
