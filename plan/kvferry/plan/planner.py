"""The planner: from two engines' descriptions to the plans of the consumer's workers, or to all reasons for refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.assignment import Assignment, Lack, Name, assign
from kvferry.plan.conversion import is_convertible, lacks_scales, needs_conversion
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.engine_shape import EngineShape
from kvferry.plan.placing import TokenMaps, parts_of, place
from kvferry.plan.refusals import PlanRefused, Reason, check_description
from kvferry.plan.run_merger import bundle
from kvferry.plan.runs import Bundle, TensorSlice
from kvferry.plan.tokens import map_tokens
from kvferry.plan.transfer_plan import Route, TransferPlan
from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription

_SAME_MODEL = {
    "fingerprint": "serve the same weights on both sides, or name them alike with model_fingerprint",
    "dtype": "start both engines with the same --dtype",
    "quantization": "start both engines with the same --quantization",
    "speculative": "give both engines the same --speculative-config",
}
_SAME_SETTING = {
    "longrope": "set --max-model-len on both sides to at most original_max_position_embeddings, or on both to more",
    "max_model_len": "set the same --max-model-len on both sides: this model's rotary embedding depends on it",
    "attention_temperature": (
        "give both sides --override-generation-config '{\"attn_temperature_tuning\": true}', or both false;"
        " without it vLLM tunes where --max-model-len is above 32768"
    ),
    "online_quantization": "start both engines with the same --quantization-config",
    "model_class": "serve the model with the same implementation on both sides (--model-impl, plugins)",
    "code": "give both sides the same --trust-remote-code and the same Python files beside the model",
    "media": "start both engines with the same multimodal options (--mm-processor-kwargs, --media-io-kwargs, …)",
    "processor": "keep the same processor files beside the model on both sides",
    "draft": "give both engines the same --speculative-config, with the same draft model",
}
"""By the first part of a setting's name the change that helps; for all others it is the model's configuration."""
_SAME_CONFIG = (
    "serve the same configuration on both sides"
    " (config.json, --hf-config-path, --hf-overrides, --trust-remote-code)"
)
_SAME_GROUPS = (
    "serve the same model, on both sides with the hybrid cache manager or on both without: it is off with"
    " --disable-hybrid-kv-cache-manager and beside a child of MultiConnector that does not support it"
)
_SAME_TENSOR = {
    "group": _SAME_GROUPS,
    "format": "use the same cache dtype and attention backend on both sides",
    "scales": "use the same static scales, or formats that can be converted",
    "cell_bytes": "use the same cache dtype and attention backend on both sides",
    "tile_tokens": "give both engines the same --block-size and attention backend: these cells cannot be divided",
}
_MAX_SETTING_REASONS = 8
_MAX_TENSOR_REASONS = 8
MAX_ROWS = 1 << 22
"""Most rows of descriptors of one plan: 160 MiB a side."""
MAX_TOTAL_DESCRIPTORS = 1 << 38
"""Most descriptors of one plan, in tables of up to 2**31: a cache of 16 TiB in runs of 64 bytes."""


def plan_transfer(
    consumer: EngineDescription, worker: int, producer: EngineDescription, costs: Costs = PUBLISHED
) -> TransferPlan:
    """Plan the reads of worker number `worker` of `consumer` from `producer`.

    Args:
        consumer, producer: descriptions with all workers of each engine.

    Raises:
        PlanRefused: with every reason.
        InvalidMessage: the producer's description contradicts itself.
    """
    assignment = _assignment(consumer, producer)
    return _plan(consumer, worker, producer, assignment, _shapes(consumer, producer), costs)


def plan_engine(
    consumer: EngineDescription, producer: EngineDescription, costs: Costs = PUBLISHED
) -> tuple[TransferPlan, ...]:
    """The plans of all workers of `consumer`, in order. Raises as `plan_transfer`."""
    assignment = _assignment(consumer, producer)
    # Once for all workers: it looks at every tensor of both engines.
    shapes = _shapes(consumer, producer)
    workers = range(len(consumer.workers))
    return tuple(_plan(consumer, worker, producer, assignment, shapes, costs) for worker in workers)


def _shapes(
    consumer: EngineDescription, producer: EngineDescription
) -> tuple[EngineShape, EngineShape]:
    return EngineShape.of(consumer), EngineShape.of(producer)


def _assignment(consumer: EngineDescription, producer: EngineDescription) -> Assignment:
    """The assignment of reads, after all checks have passed."""
    check_description(producer)
    reasons = [*_model_reasons(consumer, producer), *_group_reasons(consumer, producer)]
    reasons += _shortened([*_setting_reasons(consumer, producer)], _MAX_SETTING_REASONS, "settings")
    assignment = assign(consumer.workers, producer.workers)
    lacks = [*_lack_reasons(assignment.lacks), *_surplus_reasons(consumer, producer)]
    tensors = [*lacks, *_tensor_reasons(consumer, producer, assignment)]
    reasons += _shortened(tensors, _MAX_TENSOR_REASONS, "tensors")
    if reasons:
        raise PlanRefused(reasons)
    return assignment


def _plan(
    consumer: EngineDescription,
    worker: int,
    producer: EngineDescription,
    assignment: Assignment,
    shapes: tuple[EngineShape, EngineShape],
    costs: Costs,
) -> TransferPlan:
    here = consumer.workers[worker]
    local = {tensor.name: tensor for tensor in here.tensors}
    routes: list[Route] = []
    maps, sizes = TokenMaps(consumer), (0, 0)
    for index, wanted in assignment.sources[worker].items():
        there = producer.workers[index]
        remote = {tensor.name: tensor for tensor in there.tensors}
        parts: list[TensorSlice] = []
        for name, heads in wanted:
            ours, theirs = local[name], remote[name]
            parts += parts_of(ours, theirs, heads, maps.of(ours, theirs))
        bundles = bundle(parts)
        sizes = _check_sizes(*sizes, bundles)
        slices, staged = place(parts, bundles, costs)
        routes.append(
            Route(index, there.place, slices, bundles, staged, assignment.expected(index))
        )
    routes += [
        Route(index, producer.workers[index].place, (), (), (), assignment.expected(index))
        for index in assignment.released[worker]
    ]
    return TransferPlan(producer.engine_id, here.place, worker, tuple(routes), shapes)


def _check_sizes(rows: int, descriptors: int, bundles: Sequence[Bundle]) -> tuple[int, int]:
    """Refuse plans whose rows, one for every run and position, or whose tables would take too much memory.

    Returns:
        The numbers of rows and of descriptors, those of these bundles added.

    Raises:
        PlanRefused: there are too many.
    """
    for one in bundles:
        sides = (one.tokens.local, one.tokens.remote)
        rows += one.unit_runs * max(map(one.tokens.positions, sides))
        descriptors += one.unit_runs * max(
            one.tokens.positions(side) * side.blocks for side in sides
        )
    change = "use block sizes and cache layouts that share longer runs"
    for what, found, most in (
        ("rows", rows, MAX_ROWS),
        ("descriptors", descriptors, MAX_TOTAL_DESCRIPTORS),
    ):
        if found > most:
            raise PlanRefused([Reason("descriptors", f"{found} {what}", f"at most {most}", change)])
    return rows, descriptors


def _model_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    for field, change in _SAME_MODEL.items():
        theirs, ours = getattr(producer.facts, field), getattr(consumer.facts, field)
        if theirs != ours:
            yield Reason(f"model.{field}", repr(theirs), repr(ours), change)


def _setting_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    """One reason for each setting that differs, or that only one side has."""
    theirs = {setting.name: setting.value for setting in producer.facts.settings}
    ours = {setting.name: setting.value for setting in consumer.facts.settings}
    if theirs == ours:
        return
    for name in sorted(theirs.keys() | ours.keys()):
        left = theirs.get(name, "not set")
        right = ours.get(name, "not set")
        if left != right:
            yield Reason(
                f"model.{name}",
                left,
                right,
                _SAME_SETTING.get(name.partition(".")[0], _SAME_CONFIG),
            )


def _group_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    if len(producer.groups) != len(consumer.groups):
        yield Reason(
            "cache_groups", str(len(producer.groups)), str(len(consumer.groups)), _SAME_GROUPS
        )
        return
    for index, (theirs, ours) in enumerate(zip(producer.groups, consumer.groups, strict=True)):
        for field in ("policy", "window_tokens"):
            left, right = getattr(theirs, field), getattr(ours, field)
            if left != right:
                yield Reason(f"cache_groups[{index}].{field}", str(left), str(right), _SAME_GROUPS)


def _lack_reasons(lacks: Sequence[Lack]) -> Iterator[Reason]:
    names: dict[tuple[Range, Interleave], dict[tuple[str, str], None]] = {}
    for lack in lacks:
        names.setdefault((lack.heads, lack.share), {})[lack.name] = None
    for (heads, share), lacking in names.items():
        first, *more = ("/".join(name) for name in lacking)
        what = f"heads {heads.start}…{heads.stop - 1}" if len(heads) > 1 else f"head {heads.start}"
        if share.ranks > 1:
            what += f" of the tokens of context-parallel rank {share.rank}"
        if more:
            what += f", nor those of {len(more)} more tensors up to {more[-1]}"
        change = "serve the same layers and heads on both sides, and let every producer worker describe itself"
        yield Reason(f"tensor {first}", f"no worker holds {what}", "needs them", change)


def _surplus_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    """Refuse layers and heads that only the producer has: they show that it serves another model, or a draft model.

    What the consumer wants could be read all the same. But heads are counted by the model, not by the engine: if their
    numbers differ, head 0 of one model is not head 0 of the other.
    """
    known = {tensor.layer for worker in consumer.workers for tensor in worker.tensors}
    surplus = dict.fromkeys(
        x.layer for worker in producer.workers for x in worker.tensors if x.layer not in known
    )
    if surplus:
        first, *more = surplus
        what = f"has it, and {len(more)} more up to {more[-1]}" if more else "has it"
        yield Reason(
            f"layer {first}", what, "has no such layer", "serve the same layers on both sides"
        )
    wanted = _num_heads(consumer)
    too_many: dict[tuple[int, int], list[str]] = {}
    for key, held in _num_heads(producer).items():
        if held > wanted.get(key, held):
            too_many.setdefault((held, wanted[key]), []).append("/".join(key[0]))
    for (held, most), tensors in too_many.items():
        others = (
            f", as have {len(tensors) - 1} more tensors up to {tensors[-1]}"
            if len(tensors) > 1
            else ""
        )
        change = "serve the same model on both sides: an equal model_fingerprint does not make two models the same"
        yield Reason(f"tensor {tensors[0]}", f"{held} heads{others}", f"{most} heads", change)


def _num_heads(engine: EngineDescription) -> dict[tuple[Name, Format], int]:
    """The number of heads of every tensor, on all workers together.

    Of one format: if it is not known whether ranks hold copies, the format says so, and a rank is taken for a head.
    """
    found: dict[tuple[Name, Format], int] = {}
    for worker in engine.workers:
        for tensor in worker.tensors:
            key = tensor.name, tensor.format
            found[key] = max(found.get(key, 0), tensor.heads.stop)
    return found


def _tensor_reasons(
    consumer: EngineDescription, producer: EngineDescription, assignment: Assignment
) -> Iterator[Reason]:
    remote = [{tensor.name: tensor for tensor in worker.tensors} for worker in producer.workers]
    reported: set[tuple[str, str, str]] = set()
    for here, read in zip(consumer.workers, assignment.sources, strict=True):
        local = {tensor.name: tensor for tensor in here.tensors}
        for index, wanted in read.items():
            for source in wanted:
                ours, theirs = local[source.name], remote[index][source.name]
                if _is_alike(ours, theirs):
                    continue
                for reason in _differences(consumer, ours, theirs):
                    key = (reason.field, reason.producer, reason.consumer)
                    if key not in reported:
                        reported.add(key)
                        yield reason


def _is_alike(local: PagedTensor, remote: PagedTensor) -> bool:
    """Fast check that two tensors are compatible; nearly all pairs pass it."""
    return (
        local.tile_tokens == remote.tile_tokens == 1
        and local.group == remote.group
        and local.cell_bytes == remote.cell_bytes
        and local.format == remote.format
        and local.scales == remote.scales
    )


def _differences(
    consumer: EngineDescription, local: PagedTensor, remote: PagedTensor
) -> Iterator[Reason]:
    if local.group >= len(consumer.groups):
        return  # the groups' own reasons cover it
    is_state = consumer.groups[local.group].policy == "state"
    irrelevant = {"tile_tokens"} if is_state else set()
    if needs_conversion(local, remote) and is_convertible(local, remote):
        irrelevant |= {"format", "cell_bytes", "scales"}
        if local.format != remote.format and (lacks_scales(local) or lacks_scales(remote)):
            theirs, ours = (
                "missing" if lacks_scales(tensor) else "known" for tensor in (remote, local)
            )
            change = (
                "what is converted needs static scales: use the same --kv-cache-dtype on both sides"
            )
            yield Reason(f"{local.layer}/{local.kind}.scales", theirs, ours, change)
    for field, change in _SAME_TENSOR.items():
        theirs, ours = getattr(remote, field), getattr(local, field)
        if theirs != ours and field not in irrelevant:
            yield Reason(f"{local.layer}/{local.kind}.{field}", str(theirs), str(ours), change)
    if is_state or local.tile_tokens == 1 or local.tile_tokens != remote.tile_tokens:
        return
    unit = map_tokens(local.group, "full", local, remote).unit_tokens
    if unit % local.tile_tokens:
        change = "choose block sizes and a cp_kv_cache_interleave_size that are multiples of a cell's tokens"
        cells = f"cells of {local.tile_tokens} tokens"
        yield Reason(
            f"{local.layer}/{local.kind}.tile_tokens", f"runs of {unit} tokens", cells, change
        )


def _shortened(reasons: list[Reason], most: int, field: str) -> list[Reason]:
    """At most `most` reasons, and one more with the number of the others."""
    more = len(reasons) - most
    if more <= 0:
        return reasons
    return [*reasons[:most], Reason(field, "…", "…", f"and {more} more differences")]
