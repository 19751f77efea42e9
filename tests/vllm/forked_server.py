"""Real servers that start in seconds: vLLM's own API server in a process forked from one that has imported vLLM.

    with ForkedServer(EngineSpec("prefill", model, transfer=Transfer("kv_producer")), logs) as server:
        server.wait_ready(START_S)
        server.kill()  # every process of it, at once, as when a machine is lost
        server.start()  # another boot, at the same ports

HTTP, the engine's process, its worker's and all that they say to each other are those of a server that a user starts;
only that vLLM spawns the two where they are forked here.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from scripts.accuracy.devices import free_ports
from scripts.accuracy.engines import EngineSpec, Transfer
from scripts.accuracy.metrics import Scrape, scrape
from scripts.accuracy.model import default_cache_dir
from scripts.accuracy.processes import ServerFailed, tail
from tests.forkserver import forkserver
from tests.vllm.checked import check_every_step
from tests.vllm.small_models import small_model

_TERM_S = 20.0
_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


class ForkedServer:
    """A server at two ports that stay its own, whatever becomes of its processes. Every boot has a log of its own."""

    def __init__(self, spec: EngineSpec, logs: Path) -> None:
        self.spec = spec
        self.boots = 0
        self._logs = logs
        self.port, self.side_channel_port = free_ports(2)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.process: BaseProcess | None = None

    def __enter__(self) -> ForkedServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log_path(self) -> Path:
        """Of the last boot."""
        return self._logs / f"{self.spec.name}-{self.boots}.log"

    @property
    def alive(self) -> bool:
        """Whether the API server runs."""
        return self.process is not None and self.process.is_alive()

    @property
    def pid(self) -> int:
        """Of the API server. Raises `ServerFailed` when it was not started."""
        if self.process is None or self.process.pid is None:
            raise ServerFailed(f"{self.spec.name} was not started")
        return self.process.pid

    def start(self) -> None:
        """Start a boot and return at once."""
        self.boots += 1
        arguments = self.spec.arguments(self.port)[2:]
        environment = self.spec.environment(self.side_channel_port)
        self.process = forkserver().Process(
            target=_serve,
            args=(arguments, environment, str(self.log_path)),
            name=self.spec.name,
        )
        self.process.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it answers.

        Raises:
            ServerFailed: it ended, or the time was up.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if not self.alive:
                raise self.failure("ended before it was ready")
            with suppress(httpx.TransportError):
                if (
                    httpx.get(
                        self.base_url + "/health", timeout=5.0, trust_env=False
                    ).status_code
                    == 200
                ):
                    return
            if time.monotonic() > deadline_s:
                raise self.failure(f"was not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        self._signal(signal.SIGKILL)
        self._join(_TERM_S)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that was not enough."""
        self._signal(signal.SIGTERM)
        self._join(_TERM_S)
        self.kill()

    def metrics(self) -> Scrape:
        """The current metrics of `/metrics`."""
        return scrape(self.base_url)

    def failure(self, what: str) -> ServerFailed:
        """An error that says what happened and ends with the log."""
        return ServerFailed(
            f"{self.spec.name} {what}. The end of {self.log_path}:\n\n{tail(self.log_path)}\n"
        )

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _join(self, timeout_s: float) -> None:
        if self.process is not None:
            self.process.join(timeout_s)


def small_server(
    name: str,
    core: str,
    transfer: Transfer,
    logs: Path,
    args: Sequence[str] = (),
) -> ForkedServer:
    """A server of a small Llama that takes tokens only; not started yet."""
    spec = EngineSpec(
        name,
        str(small_model("small-llama-4", default_cache_dir())),
        devices=(core,),
        max_model_len=1024,
        transfer=transfer,
        extra_args=("--skip-tokenizer-init", "--num-gpu-blocks-override", "64", *args),
    )
    return ForkedServer(spec, logs)


def _serve(
    arguments: Sequence[str], environment: Mapping[str, str], log_path: str
) -> None:
    with open(log_path, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _track_resources_apart()
    _end_with_the_tests()
    os.setsid()
    os.environ.update(environment)

    import torch
    import torch._dynamo
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.logger import _configure_vllm_root_logger
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    _configure_vllm_root_logger()  # VLLM_LOGGING_LEVEL was read when vLLM was imported
    torch.set_num_threads(1)
    torch._dynamo.config.disable = (
        True  # TORCH_COMPILE_DISABLE was read when torch was imported
    )
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    registry._run_in_subprocess = lambda look: look()
    check_every_step()
    sys.argv = list(arguments)
    entry.main()


def _end_with_the_tests() -> None:
    """SIGTERM when the process that this one was forked from is gone, which ends with the tests, however they end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _track_resources_apart() -> None:
    """Shared memory of killed processes is cleaned up by a process of their own, which is outside of their group and
    writes to their log; that of the tests would do so when all tests are over, and write to their end."""
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = None
    tracker._pid = None
    tracker.ensure_running()
