"""A sleep of the engine: the caches are withdrawn before vLLM takes their pages away.

All ways lead through two objects of vLLM, in both versions: `/sleep`, `/wake_up`, `LLM.sleep` with its levels and tags,
and `release_kv_cache_memory` call the executor (v1/executor/abstract.py:382), and the executor has every worker call
its `SleepModeBackend` (v1/worker/gpu_worker.py:311), which takes the pages.

| | 0.32 | 0.33 |
| --- | --- | --- |
| worker: before the pages go, and when they are back | the backend, `guard_sleep` | connector hooks |
| scheduler: the caches are about to be withdrawn | the executor, `follow_sleep` | the executor, `follow_sleep` |
| scheduler: the workers have described themselves again | the executor, `follow_sleep` | `EngineCore.wake_up` |

The worker's part is what is safe or not, so it is the last thing before the pages: whoever has a worker sleep, also by
`collective_rpc`, passes it. The scheduler's part saves peers vain attempts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
    from vllm.v1.executor.abstract import Executor

logger = logging.getLogger(__name__)

CACHES = "kv_cache"
"""vLLM's tag of the caches' pages."""


class GuardedCaches(Protocol):
    """The caches of a worker of this process."""

    def withdraw(self) -> None:
        """Raises if the pages must stay."""

    def restore(self) -> None:
        """The pages are back."""


class SleepFollower(Protocol):
    """The scheduler side of an engine."""

    def withdrawn(self) -> None:
        """The workers withdraw their caches, or have."""

    def described(self, handshakes: Collection[KVConnectorHandshakeMetadata]) -> None:
        """The workers have described themselves."""


guarded: weakref.WeakSet[GuardedCaches] = weakref.WeakSet()
"""All of this process: vLLM's allocator takes the pages of all engines of a process at once."""
# By engine id: a program may have several engines in one process.
_followers: weakref.WeakValueDictionary[str, SleepFollower] = (
    weakref.WeakValueDictionary()
)


def can_sleep(vllm_config: VllmConfig) -> bool:
    """Whether pages of this engine's caches may go. The allocator alone is enough: vLLM checks no other flag then."""
    model = vllm_config.model_config
    return bool(model.enable_sleep_mode or model.enable_cumem_allocator)


def has_sleep_hooks() -> bool:
    """Whether vLLM tells connectors of a sleep itself."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def guard_sleep(memory: GuardedCaches) -> None:
    """Have this worker's caches withdrawn before any sleep of this process, and restored after it.

    Raises:
        AttributeError: this vLLM has no such backend: a sleep would go unnoticed.
    """
    if has_sleep_hooks():
        return
    guarded.add(memory)
    _guard_backends()


def unguard_sleep(memory: GuardedCaches) -> None:
    """The worker has ended: its caches may be another engine's memory by now. No-op for one that is not guarded."""
    # Not left to the weak references: whoever still has one of its objects would have it registered again.
    guarded.discard(memory)


def follow_sleep(engine_id: str, follower: SleepFollower) -> None:
    """Tell the scheduler side when its engine falls asleep, and, unless vLLM does, when it has woken.

    Raises:
        AttributeError: this vLLM's executor cannot sleep.
    """
    _followers[engine_id] = follower
    _follow_executors()


@functools.cache
def _guard_backends() -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    # The factory, not one backend: which one a worker has is decided at its first sleep, and plugins bring their own.
    get_backend_class = SleepModeBackendFactory.get_backend_class

    def get_guarded_class(name: str) -> type[SleepModeBackend]:
        kind = get_backend_class(name)
        return type(f"Guarded{kind.__name__}", (_Guard, kind), {})

    SleepModeBackendFactory.get_backend_class = staticmethod(get_guarded_class)


class _Guard:
    """What stands before a `SleepModeBackend` in its class."""

    def suspend(self, level: int = 1) -> None:
        # Whatever the level keeps of the weights, the caches' pages go.
        _withdraw_all()
        super().suspend(level)  # type: ignore[misc]

    def discard(self, tags: tuple[str, ...]) -> None:
        if CACHES in tags:
            _withdraw_all()
        super().discard(tags)  # type: ignore[misc]

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)  # type: ignore[misc]
        if tags is None or CACHES in tags:
            for memory in list(guarded):
                memory.restore()


def _withdraw_all() -> None:
    for memory in list(guarded):
        memory.withdraw()


@functools.cache
def _follow_executors() -> None:
    from vllm.v1.executor.abstract import Executor

    for call in (Executor.sleep, Executor.discard, Executor.wake_up):
        setattr(Executor, call.__name__, _followed(call))


def _followed(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the executor that tells the engine's scheduler side, before a sleep and after whatever has come of
    the call. What vLLM sees is the same."""
    is_wake_up = call.__name__ == "wake_up"

    @functools.wraps(call)
    def followed(executor: Executor, *args: Any, **kwargs: Any) -> Any:
        transfer = executor.vllm_config.kv_transfer_config
        follower = _followers.get(transfer.engine_id) if transfer is not None else None
        if follower is None:
            return call(executor, *args, **kwargs)
        # Before: a peer that is described an agent must have time to connect to it, or not be described it.
        if not is_wake_up:
            follower.withdrawn()
        try:
            result = call(executor, *args, **kwargs)
        except BaseException:
            # Awake still: handshakes are answered again, whoever resumes the engine.
            with contextlib.suppress(Exception):
                _tell(follower, executor, describes=True)
            raise
        _tell(follower, executor, describes=not has_sleep_hooks())
        return result

    return followed


def _tell(follower: SleepFollower, executor: Executor, *, describes: bool) -> None:
    if CACHES in executor.sleeping_tags:
        follower.withdrawn()
    elif describes:
        # As vLLM does at the start (v1/engine/core.py:202), and 0.33 after each wake-up.
        follower.described(_handshakes(executor.get_kv_connector_handshake_metadata()))


def _handshakes(
    by_worker: Iterable[dict[tuple[int, int], KVConnectorHandshakeMetadata] | None],
) -> list[KVConnectorHandshakeMetadata]:
    by_place: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
    for of_worker in by_worker:
        by_place.update(of_worker or {})
    return list(by_place.values())
