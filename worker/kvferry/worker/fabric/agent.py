"""NIXL's raw agent: finding the bindings, configuring the agent, naming its errors, and the envelope of its metadata.

The `nixl_agent` wrapper of NIXL's Python package is not used, because it fixes the delay of the progress thread at
zero, with which the thread calls `poll(timeout=0)` for ever and takes a whole core; the delay can only be set on the
raw configuration, before the agent is made.

The envelope in which an agent's metadata travels to its peers:

    magic (8 bytes) | BLAKE2b-128 of the rest (16) | length of the name (2, little endian) | agent name, UTF-8 | body

The body belongs to the fabric. Two fields are outside it. The name lets a fabric refuse an agent it knows *before*
its library replaces that agent's entry and invalidates its descriptors. The checksum is there because NIXL passes the
body to UCX, which crashes on some damaged addresses (found by flipping bytes): it turns damage into an error, and is
no defence against a malicious peer.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import importlib
import logging
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvferry.protocol.errors import shorten
from kvferry.worker.fabric.errors import FabricUnavailable, InvalidFabricRequest, InvalidMetadata

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_US = 20_000
"""The progress thread is event driven, and woken at least this often; 0.2 % of a core. With 0 it would spin."""

_SHARED_MEMORY = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem"})
_ALL_SHARED_MEMORY = frozenset({"sm", "shm", "mm"})
_TCP = frozenset({"tcp"})
_CUDA_IPC = frozenset({"cuda", "cuda_ipc"})
NO, YES = frozenset({"n", "no", "off", "0"}), frozenset({"y", "yes", "on", "1"})
"""The words by which UCX switches a setting off, and on."""
GPU_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


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


def ucx_defaults(environ: Mapping[str, str], *, has_cuda: bool) -> dict[str, str]:
    """UCX settings that kvferry wants and that `environ` does not set.

    Args:
        has_cuda: whether UCX finds CUDA's driver.

    Messages within a host go over loopback TCP, UCX's default. Through shared memory, with `UCX_MM_ERROR_HANDLING=y`,
    a process that is killed in the middle of a message, or stopped for long, can hang others (docs/reliability.md).

    Where `UCX_TLS` admits shared memory and not TCP:

    - `UCX_MM_ERROR_HANDLING=y`: without it `sm,self` cannot make an agent at all.

    Where messages may go through shared memory, by this setting or by `environ`:

    - `UCX_KEEPALIVE_INTERVAL=300s` instead of 20 s. Keepalives to a peer that does not receive them (frozen, or an
      agent that was closed in a process that lives) fill its queue of 256. Then NIXL's progress thread spins on a core
      and closing the agent hangs: after 85 minutes with one peer, 11 with eight, and 21 hours with 300 s. It is not
      `inf`: over shared memory alone a read that is posted to a dead peer ends with the next keepalive, or never.

    Where TCP may carry data:

    - `UCX_TCP_TX_SEG_SIZE=256k` and `UCX_TCP_RX_SEG_SIZE=256k` instead of 8 KiB: reads of 1 MiB and more are two to
      five times faster; memory per connection is the same within 0.05 MB.

    Where CUDA IPC may be used:

    - `UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y` instead of `auto`, which reads over CUDA IPC only where NVML names the other end
      of every NVLink of GPU 0: not on nodes with PCIe alone, and not in virtual machines that hide the links. There a
      read between GPUs of a host goes through host memory and loopback TCP, without a word. GPUs that cannot reach each
      other are left out by UCX either way.

    What `UCX_TLS` excludes is left alone: UCX warns of settings that nothing uses.
    """
    with_tcp = uses_tcp(environ)
    chosen: dict[str, str] = {}
    if _may_use(environ, _SHARED_MEMORY, _ALL_SHARED_MEMORY):
        if not with_tcp:
            chosen["UCX_MM_ERROR_HANDLING"] = "y"
        if environ.get("UCX_MM_ERROR_HANDLING", "n" if with_tcp else "y").lower() not in NO:
            chosen["UCX_KEEPALIVE_INTERVAL"] = "300s"
    if with_tcp:
        chosen |= {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
    if has_cuda and _may_use(environ, _CUDA_IPC, _CUDA_IPC):
        chosen[GPU_READS] = "y"
    return {name: value for name, value in chosen.items() if name not in environ}


def uses_tcp(environ: Mapping[str, str]) -> bool:
    """Whether `UCX_TLS` admits TCP."""
    return _may_use(environ, _TCP, _TCP)


def _may_use(environ: Mapping[str, str], some: frozenset[str], all_of_them: frozenset[str]) -> bool:
    """Whether `UCX_TLS` admits a kind of transport.

    Args:
        some: names of which any one admits it.
        all_of_them: names of which any one, behind `^`, excludes it.
    """
    transports = environ.get("UCX_TLS", "all")
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    return not names & all_of_them if transports.startswith("^") else bool(names & (some | {"all"}))


def apply_ucx_defaults(environ: MutableMapping[str, str]) -> None:
    """Set `ucx_defaults` in the environment of this process; UCX reads it when an agent is made."""
    chosen = ucx_defaults(environ, has_cuda=_has_cuda_driver())
    environ.update(chosen)
    for name, value in chosen.items():
        logger.info("set %s=%s, which the environment left open", name, value)


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def load_bindings() -> ModuleType:
    """NIXL's bindings, from the package (nixl_cu12, nixl_cu13 …) that the meta package `nixl` chose.

    Raises `FabricUnavailable` if there is none.
    """
    try:
        api = importlib.import_module("nixl._api")
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
        # pybind11 raises the others for C++ exceptions (std::length_error is ValueError, and so on) and for arguments
        # and results that do not convert.
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

    Raises `FabricUnavailable` if a backend is not installed or does not start, as with `UCX_TLS` settings that leave it
    no transport.
    """
    raw = bindings.nixlAgentConfig()
    raw.useProgThread = config.progress_thread
    raw.useListenThread = False
    raw.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    raw.pthrDelay = PROGRESS_INTERVAL_US
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


MAX_NAME_BYTES = 255

_MAGIC = b"KVFABRC1"
_DIGEST_BYTES = 16
_NAME_START = len(_MAGIC) + _DIGEST_BYTES + 2


def check_agent_name(agent_name: str) -> bytes:
    """The name in UTF-8; raises `InvalidFabricRequest` unless that is 1 … `MAX_NAME_BYTES` bytes without a NUL."""
    try:
        name = agent_name.encode()
    except UnicodeEncodeError as error:
        raise InvalidFabricRequest(
            "name agent", f"{shorten(agent_name)} cannot be written in UTF-8"
        ) from error
    if not 0 < len(name) <= MAX_NAME_BYTES or b"\0" in name:
        raise InvalidFabricRequest(
            "name agent", f"{shorten(agent_name)}; expected 1 … {MAX_NAME_BYTES} bytes, no NUL"
        )
    return name


def wrap_metadata(agent_name: str, body: bytes) -> bytes:
    """The envelope around `body`; raises `InvalidFabricRequest` for a name that `check_agent_name` refuses."""
    name = check_agent_name(agent_name)
    rest = len(name).to_bytes(2, "little") + name + body
    return _MAGIC + _digest(rest) + rest


def open_metadata(metadata: bytes) -> tuple[str, bytes]:
    """(agent name, body); raises `InvalidMetadata` for anything that `wrap_metadata` did not make."""
    if (
        not isinstance(metadata, bytes)
        or not metadata.startswith(_MAGIC)
        or len(metadata) < _NAME_START
    ):
        raise InvalidMetadata("add peer", f"{shorten(metadata)} is no fabric metadata")
    digest, rest = metadata[len(_MAGIC) : _NAME_START - 2], metadata[_NAME_START - 2 :]
    if not hmac.compare_digest(digest, _digest(rest)):
        raise InvalidMetadata(
            "add peer", f"the checksum of {len(metadata)} bytes of metadata is wrong"
        )
    name_end = 2 + int.from_bytes(rest[:2], "little")
    try:
        name = rest[2:name_end].decode()
    except UnicodeDecodeError as error:
        raise InvalidMetadata("add peer", "the agent name is not UTF-8") from error
    if not 0 < name_end - 2 <= MAX_NAME_BYTES or len(rest) < name_end:
        raise InvalidMetadata(
            "add peer", f"the agent name has {name_end - 2} bytes; expected 1 … {MAX_NAME_BYTES}"
        )
    return name, rest[name_end:]


def _digest(rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=_DIGEST_BYTES).digest()
