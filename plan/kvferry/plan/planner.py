"""The planner: from two engines' descriptions to the plans of the consumer's workers, or to all reasons for refusal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvferry.plan.assignment import Assignment, Lack, Name, assign
from kvferry.plan.conversion import is_convertible, lacks_scales, needs_conversion
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.engine_shape import EngineShape
from kvferry.plan.placing import TokenMaps, parts_of, place, place_mapped
from kvferry.plan.refusals import PlanRefused, Reason, check_description
from kvferry.plan.run_merger import merge
from kvferry.plan.runs import MAX_DESCRIPTORS, Bundle, TensorSlice
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
# Of another model every tensor differs, and hundreds of lines would hide the reason that names it.
_MAX_SETTING_REASONS = 8
_MAX_TENSOR_REASONS = 8

# A hostile producer could make a worker prepare hundreds of thousands of tables: what a plan takes
# is limited before anything of it is made.
MAX_ROWS = 1 << 22
"""Rows of descriptors of one plan, at most: 160 MiB a side."""


def plan_transfer(
    consumer: EngineDescription,
    worker: int,
    producer: EngineDescription,
    costs: Costs = PUBLISHED,
    mappable: Collection[int] = (),
) -> TransferPlan:
    """Plan the reads of worker number `worker` of `consumer` from `producer`.

    Args:
        consumer, producer: descriptions with all workers of each engine.
        mappable: workers of the producer whose memory may be mapped: what cannot be read from them otherwise is planned
            all the same (`Route.unless_mapped`).

    Raises:
        PlanRefused: with every reason.
        InvalidMessage: the producer's description contradicts itself.
    """
    assignment = _assignment(consumer, producer)
    shapes = _shapes(consumer, producer)
    return _plan(consumer, worker, producer, assignment, shapes, costs, mappable)


def plan_engine(
    consumer: EngineDescription,
    producer: EngineDescription,
    costs: Costs = PUBLISHED,
    mappable: Collection[int] = (),
) -> tuple[TransferPlan, ...]:
    """The plans of all workers of `consumer`, in order.

    Args:
        mappable: as for `plan_transfer`.

    Raises:
        PlanRefused: as `plan_transfer`.
        InvalidMessage: as `plan_transfer`.
    """
    assignment = _assignment(consumer, producer)
    # Once for all workers: it looks at every tensor of both engines. For each worker, 256 workers
    # of 80 layers took 2.5 s; now it is 0.28.
    shapes = _shapes(consumer, producer)
    workers = range(len(consumer.workers))
    return tuple(
        _plan(consumer, worker, producer, assignment, shapes, costs, mappable)
        for worker in workers
    )


def _shapes(
    consumer: EngineDescription, producer: EngineDescription
) -> tuple[EngineShape, EngineShape]:
    return EngineShape.from_engine(consumer), EngineShape.from_engine(producer)


def _assignment(consumer: EngineDescription, producer: EngineDescription) -> Assignment:
    """The assignment of reads, after all checks have passed."""
    # The consumer describes itself; what the producer sent is input.
    check_description(producer)
    settings = list(_setting_reasons(consumer, producer))
    assignment = assign(consumer.workers, producer.workers)
    tensors = [
        *_lack_reasons(assignment.lacks),
        *_surplus_reasons(consumer, producer),
        *_tensor_reasons(consumer, producer, assignment),
    ]
    reasons = [
        *_model_reasons(consumer, producer),
        *_group_reasons(consumer, producer),
        *_shortened(settings, _MAX_SETTING_REASONS, "settings"),
        *_shortened(tensors, _MAX_TENSOR_REASONS, "tensors"),
    ]
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
    mappable: Collection[int],
) -> TransferPlan:
    own = consumer.workers[worker]
    local_tensors = {tensor.name: tensor for tensor in own.tensors}
    maps = TokenMaps(consumer)
    sizes = _PlanSizes()
    routes: list[Route] = []
    for index, reads in assignment.sources[worker].items():
        remote_worker = producer.workers[index]
        remote_tensors = {tensor.name: tensor for tensor in remote_worker.tensors}
        parts: list[TensorSlice] = []
        for name, heads in reads:
            local = local_tensors[name]
            remote = remote_tensors[name]
            parts += parts_of(local, remote, heads, maps.between(local, remote))
        bundles = merge(parts)
        # Before they are placed, which takes time and memory for each.
        sizes.add(bundles)
        unless_mapped: tuple[Reason, ...] = ()
        try:
            slices, sources = place(parts, bundles, costs)
        except PlanRefused as refused:
            # Mapped memory needs no pool. Whether it can be mapped is known when it is.
            if index not in mappable:
                raise
            slices = place_mapped(parts, bundles)
            sources = ()
            unless_mapped = refused.reasons
        route = Route(
            worker=index,
            place=remote_worker.place,
            slices=slices,
            bundles=bundles,
            sources=sources,
            expected=assignment.expected(index),
            unless_mapped=unless_mapped,
        )
        routes.append(route)
    # A producer frees its blocks when all of its workers were told so, those too of which nothing is read.
    for index in assignment.released[worker]:
        route = Route(
            worker=index,
            place=producer.workers[index].place,
            slices=(),
            bundles=(),
            sources=(),
            expected=assignment.expected(index),
        )
        routes.append(route)
    return TransferPlan(producer.engine_id, own.place, worker, tuple(routes), shapes)


class _PlanSizes:
    """The numbers of rows, one for every run and position, and of descriptors of a plan."""

    def __init__(self) -> None:
        self._rows = 0
        self._descriptors = 0

    def add(self, bundles: Sequence[Bundle]) -> None:
        """Add the bundles of a route.

        Raises:
            PlanRefused: the plan would take too much memory.
        """
        for bundle in bundles:
            tokens = bundle.tokens
            sides = (tokens.local, tokens.remote)
            self._rows += bundle.unit_runs * max(
                tokens.positions(side) for side in sides
            )
            self._descriptors += bundle.unit_runs * max(
                tokens.positions(side) * side.blocks for side in sides
            )
        _check_size("rows", self._rows, MAX_ROWS)
        _check_size("descriptors", self._descriptors, MAX_DESCRIPTORS)


def _check_size(noun: str, number: int, limit: int) -> None:
    if number <= limit:
        return
    reason = Reason(
        field="descriptors",
        producer=f"{number} {noun}",
        consumer=f"at most {limit}",
        change="use block sizes and cache layouts that share longer runs",
    )
    raise PlanRefused([reason])


def _model_reasons(
    consumer: EngineDescription, producer: EngineDescription
) -> Iterator[Reason]:
    for field, change in _SAME_MODEL.items():
        theirs = getattr(producer.facts, field)
        ours = getattr(consumer.facts, field)
        if theirs != ours:
            yield Reason(f"model.{field}", repr(theirs), repr(ours), change)


def _setting_reasons(
    consumer: EngineDescription, producer: EngineDescription
) -> Iterator[Reason]:
    """One reason for each setting that differs, or that only one side has."""
    theirs = {setting.name: setting.value for setting in producer.facts.settings}
    ours = {setting.name: setting.value for setting in consumer.facts.settings}
    if theirs == ours:
        return
    for name in sorted(theirs.keys() | ours.keys()):
        their_value = theirs.get(name, "not set")
        our_value = ours.get(name, "not set")
        if their_value == our_value:
            continue
        first_part, _, _ = name.partition(".")
        change = _SAME_SETTING.get(first_part, _SAME_CONFIG)
        yield Reason(f"model.{name}", their_value, our_value, change)


def _group_reasons(
    consumer: EngineDescription, producer: EngineDescription
) -> Iterator[Reason]:
    if len(producer.groups) != len(consumer.groups):
        yield Reason(
            "cache_groups",
            str(len(producer.groups)),
            str(len(consumer.groups)),
            _SAME_GROUPS,
        )
        return
    for index, (theirs, ours) in enumerate(
        zip(producer.groups, consumer.groups, strict=True)
    ):
        for field in ("policy", "window_tokens"):
            their_value = str(getattr(theirs, field))
            our_value = str(getattr(ours, field))
            if their_value != our_value:
                yield Reason(
                    f"cache_groups[{index}].{field}",
                    their_value,
                    our_value,
                    _SAME_GROUPS,
                )


def _lack_reasons(lacks: Sequence[Lack]) -> Iterator[Reason]:
    """One reason for all tensors that lack the same heads and tokens."""
    names_by_part: dict[tuple[Range, Interleave], dict[Name, None]] = {}
    for lack in lacks:
        names_by_part.setdefault((lack.heads, lack.share), {})[lack.name] = None
    for (heads, share), names in names_by_part.items():
        first, *more = ["/".join(name) for name in names]
        lacking = f"head {heads.start}"
        if len(heads) > 1:
            lacking = f"heads {heads.start}…{heads.stop - 1}"
        if share.ranks > 1:
            lacking += f" of the tokens of context-parallel rank {share.rank}"
        if more:
            lacking += f", nor those of {len(more)} more tensors up to {more[-1]}"
        change = "serve the same layers and heads on both sides, and let every producer worker describe itself"
        yield Reason(
            f"tensor {first}", f"no worker holds {lacking}", "needs them", change
        )


def _surplus_reasons(
    consumer: EngineDescription, producer: EngineDescription
) -> Iterator[Reason]:
    """Refuse layers and heads that only the producer has: they show that it serves another model, or a draft model."""
    known_layers = {
        tensor.layer for worker in consumer.workers for tensor in worker.tensors
    }
    surplus: dict[str, None] = {}
    for worker in producer.workers:
        for tensor in worker.tensors:
            if tensor.layer not in known_layers:
                surplus[tensor.layer] = None
    if surplus:
        first, *more = surplus
        has = "has it"
        if more:
            has += f", and {len(more)} more up to {more[-1]}"
        yield Reason(
            f"layer {first}",
            has,
            "has no such layer",
            "serve the same layers on both sides",
        )
    # What the consumer wants could be read nevertheless. But heads are counted by the model, not by
    # the engine: if their numbers differ, head 0 of one model is not head 0 of the other.
    our_heads = _num_heads(consumer)
    names_by_heads: dict[tuple[int, int], list[str]] = {}
    for key, theirs in _num_heads(producer).items():
        ours = our_heads.get(key)
        if ours is not None and theirs > ours:
            name, _ = key
            names_by_heads.setdefault((theirs, ours), []).append("/".join(name))
    for (theirs, ours), names in names_by_heads.items():
        has = f"{theirs} heads"
        if len(names) > 1:
            has += f", as have {len(names) - 1} more tensors up to {names[-1]}"
        change = "serve the same model on both sides: an equal model_fingerprint does not make two models the same"
        yield Reason(f"tensor {names[0]}", has, f"{ours} heads", change)


def _num_heads(engine: EngineDescription) -> dict[tuple[Name, Format], int]:
    """The number of heads of every tensor, on all workers together.

    Of one format: if it is not known whether ranks hold copies, the format says so, and a rank is taken for a head.
    """
    num_heads: dict[tuple[Name, Format], int] = {}
    for worker in engine.workers:
        for tensor in worker.tensors:
            key = (tensor.name, tensor.format)
            num_heads[key] = max(num_heads.get(key, 0), tensor.heads.stop)
    return num_heads


def _tensor_reasons(
    consumer: EngineDescription, producer: EngineDescription, assignment: Assignment
) -> Iterator[Reason]:
    """Each difference once, however many workers and layers have it."""
    remote = [
        {tensor.name: tensor for tensor in worker.tensors}
        for worker in producer.workers
    ]
    reported: set[tuple[str, str, str]] = set()
    for worker, sources in zip(consumer.workers, assignment.sources, strict=True):
        local = {tensor.name: tensor for tensor in worker.tensors}
        for index, reads in sources.items():
            for read in reads:
                ours = local[read.name]
                theirs = remote[index][read.name]
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
    # The groups' own reasons cover it.
    if local.group >= len(consumer.groups):
        return
    name = f"{local.layer}/{local.kind}"
    is_state = consumer.groups[local.group].policy == "state"
    irrelevant: set[str] = set()
    if is_state:
        irrelevant.add("tile_tokens")
    if needs_conversion(local, remote) and is_convertible(local, remote):
        irrelevant |= {"format", "cell_bytes", "scales"}
        # Without a description of its scales the bytes of one format can still be copied, but not
        # converted.
        if local.format != remote.format and (
            lacks_scales(local) or lacks_scales(remote)
        ):
            change = "what is converted needs static scales: use the same --kv-cache-dtype on both sides"
            yield Reason(
                f"{name}.scales", _scales_state(remote), _scales_state(local), change
            )
    for field, change in _SAME_TENSOR.items():
        theirs = getattr(remote, field)
        ours = getattr(local, field)
        if theirs != ours and field not in irrelevant:
            yield Reason(f"{name}.{field}", str(theirs), str(ours), change)
    if is_state or local.tile_tokens == 1 or local.tile_tokens != remote.tile_tokens:
        return
    # A cell of several tokens cannot be divided, so a unit must be a whole number of cells.
    unit = map_tokens(local.group, "full", local, remote).unit_tokens
    if unit % local.tile_tokens:
        yield Reason(
            field=f"{name}.tile_tokens",
            producer=f"runs of {unit} tokens",
            consumer=f"cells of {local.tile_tokens} tokens",
            change="choose block sizes and a cp_kv_cache_interleave_size that are multiples of a cell's tokens",
        )


def _scales_state(tensor: PagedTensor) -> str:
    if lacks_scales(tensor):
        return "missing"
    return "known"


def _shortened(reasons: list[Reason], limit: int, field: str) -> list[Reason]:
    """At most `limit` reasons, and one more with the number of the others."""
    more = len(reasons) - limit
    if more <= 0:
        return reasons
    return [*reasons[:limit], Reason(field, "…", "…", f"and {more} more differences")]
