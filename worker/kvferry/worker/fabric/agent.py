"""NIXL's raw agent: finding the bindings, configuring the agent, naming its errors."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvferry.worker.fabric.errors import FabricUnavailable

PROGRESS_INTERVAL_US = 20_000
"""The progress thread is event driven, and woken at least this often; 0.2 % of a core."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """How an agent is made.

    backends: NIXL plugins, in order. num_threads: extra threads of the UCX backend, 0 for none (see NIXL).
    progress_thread: serve peers, and send messages, also while the agent is not called. Without it a message that was
    sent before the connection stands leaves only while something is polled here (seen: never, on an idle sender).
    """

    backends: tuple[str, ...] = ("UCX",)
    progress_thread: bool = True
    num_threads: int = 0


def load_bindings() -> ModuleType:
    """NIXL's bindings, from the package (nixl_cu12, nixl_cu13 …) that the meta package `nixl` chose.

    Raises:
        FabricUnavailable: there is none.
    """
    try:
        api = importlib.import_module("nixl._api")
        # `nixl` re-exports the names of the package that it chose, so the module of one of them
        # tells which.
        package = sys.modules[api.nixl_agent.__module__].__package__
        return importlib.import_module(f"{package}._bindings")
    except (ImportError, AttributeError, KeyError) as error:
        reason = f"the Python package nixl is not usable: {error}; pip install 'kvferry[worker]'"
        raise FabricUnavailable("load NIXL", reason) from error


class NixlErrors:
    """The exceptions that a call into the bindings can raise, grouped by the port's errors."""

    def __init__(self, bindings: ModuleType) -> None:
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self.not_found: type[Exception] = bindings.nixlNotFoundError
        self.invalid: tuple[type[Exception], ...] = (
            bindings.nixlInvalidParamError,
            bindings.nixlMismatchError,
        )
        named = [
            error
            for name, error in vars(bindings).items()
            if name.startswith("nixl") and name.endswith("Error")
        ]
        # pybind11 raises the others for C++ exceptions (std::length_error is ValueError, and so on)
        # and for arguments and results that do not convert.
        self.every: tuple[type[Exception], ...] = (
            *named,
            RuntimeError,
            ValueError,
            IndexError,
            OverflowError,
            MemoryError,
            TypeError,
        )

    @staticmethod
    def describe(error: BaseException) -> str:
        """One line for a `FabricError`'s reason."""
        return f"{type(error).__name__}: {error}"


def make_agent(bindings: ModuleType, agent_name: str, config: AgentConfig) -> Any:
    """The raw agent, with its backends started.

    Raises:
        FabricUnavailable: a backend is not installed or does not start, as with `UCX_TLS` settings that leave it no
            transport.
    """
    # Not `nixl_agent`, the wrapper of NIXL's Python package: it fixes the delay of the progress
    # thread at zero. The thread then calls `poll(timeout=0)` for ever and takes a whole core, and
    # no environment variable changes it. The delay can only be set here, before the agent is made.
    raw = bindings.nixlAgentConfig()
    raw.useProgThread = config.progress_thread
    raw.pthrDelay = PROGRESS_INTERVAL_US
    raw.useListenThread = False
    # One thread owns a fabric, so the agent needs no locks. Two threads on one agent gain nothing
    # (measured).
    raw.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    raw.captureTelemetry = True
    try:
        agent = bindings.nixlAgent(agent_name, raw)
        installed = agent.getAvailPlugins()
        missing = [name for name in config.backends if name not in installed]
        if missing:
            raise FabricUnavailable(
                "make agent", f"NIXL has no backend {missing}; it has {installed}"
            )
        for name in config.backends:
            agent.createBackend(name, _backend_options(name, config))
    except NixlErrors(bindings).every as error:
        reason = f"backends {list(config.backends)}: {NixlErrors.describe(error)}"
        if isinstance(error, bindings.nixlNotFoundError):
            reason += "; a library that the plugin needs is missing: NIXL_LOG_LEVEL=INFO names it"
        raise FabricUnavailable("make agent", reason) from error
    return agent


def _backend_options(backend: str, config: AgentConfig) -> dict[str, str]:
    if config.num_threads > 0 and backend in ("UCX", "LIBFABRIC"):
        return {"num_threads": str(config.num_threads)}
    return {}
