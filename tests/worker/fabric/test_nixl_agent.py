"""How NIXL agents are made: UCX's settings, the bindings, the progress thread, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvferry.worker.fabric.errors import FabricUnavailable, InvalidFabricRequest
from kvferry.worker.fabric.nixl import AgentConfig, NixlFabric, load_bindings
from kvferry.worker.fabric.ucx_settings import GPU_READS, slow_within_host, ucx_defaults

pytestmark = pytest.mark.slow

IDLE_S = 2.0
MAX_IDLE_CORES = 0.03


def output_of(program: str, **environ: str) -> str:
    """The output of a program, which does not inherit UCX settings of this process."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("UCX_")
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def answer_of(program: str, **environ: str) -> Any:
    """The JSON that a program prints as its last line."""
    return json.loads(output_of(program, **environ).splitlines()[-1])


SHARED = {"UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "300s"}
TCP = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, TCP),
        ({"UCX_MM_ERROR_HANDLING": "y"}, {"UCX_KEEPALIVE_INTERVAL": "300s"} | TCP),
        ({"UCX_MM_ERROR_HANDLING": "N"}, TCP),
        ({"UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "inf"}, TCP),
        ({"UCX_TCP_TX_SEG_SIZE": "8k"}, {"UCX_TCP_RX_SEG_SIZE": "256k"}),
        ({"UCX_TLS": "sm,self", "UCX_MM_ERROR_HANDLING": "n"}, {}),
        ({"UCX_TLS": "sm,self"}, SHARED),
        ({"UCX_TLS": "rc, shm"}, SHARED),
        ({"UCX_TLS": "^tcp"}, SHARED),
        ({"UCX_TLS": "^sm"}, TCP),
        ({"UCX_TLS": "tcp"}, TCP),
        ({"UCX_TLS": "rc,cuda_copy"}, {}),
        ({"UCX_TLS": "^sm,tcp"}, {}),
    ],
)
def test_ucx_defaults_fill_in_only_what_is_open_and_used(
    environ: dict[str, str], chosen: dict[str, str]
) -> None:
    before = dict(environ)
    assert ucx_defaults(environ, has_cuda=False) == chosen
    assert environ == before


@pytest.mark.parametrize(
    ("environ", "is_chosen"),
    [
        ({}, True),
        ({GPU_READS: "auto"}, False),
        ({"UCX_TLS": "rc,cuda"}, True),
        ({"UCX_TLS": "rc,cuda_copy,cuda_ipc"}, True),
        ({"UCX_TLS": "^cuda_ipc"}, False),
        ({"UCX_TLS": "rc,cuda_copy"}, False),
    ],
)
def test_reads_between_gpus_go_over_cuda_ipc_where_it_may_be_used(
    environ: dict[str, str], is_chosen: bool
) -> None:
    assert ucx_defaults(environ, has_cuda=True).get(GPU_READS) == (
        "y" if is_chosen else None
    )


@pytest.mark.parametrize(
    ("environ", "is_device", "shares_ipc", "has_rdma", "said"),
    [
        ({}, False, True, False, None),
        ({"UCX_TLS": "tcp"}, False, True, False, "leaves out shared memory"),
        ({"UCX_TLS": "^sm"}, False, True, False, "leaves out shared memory"),
        ({"UCX_TLS": "tcp,cma"}, False, True, False, None),
        ({"UCX_TLS": "tcp,rc"}, False, True, True, None),
        ({"UCX_TLS": "tcp,rc"}, False, True, False, "leaves out shared memory"),
        ({}, False, False, False, "--ipc=host"),
        ({}, False, False, True, None),
        ({}, True, True, False, None),
        ({"UCX_TLS": "tcp,cuda_copy"}, True, True, False, "leaves out cuda_ipc"),
        ({"UCX_TLS": "tcp,cuda"}, True, True, False, None),
        ({GPU_READS: "n"}, True, True, False, f"{GPU_READS}=n"),
        ({}, True, False, False, "hostIPC"),
    ],
)
def test_what_leaves_loopback_tcp_alone_within_a_host_is_named(
    environ: dict[str, str],
    is_device: bool,
    shares_ipc: bool,
    has_rdma: bool,
    said: str | None,
) -> None:
    found = slow_within_host(
        environ, is_device=is_device, shares_ipc=shares_ipc, has_rdma=has_rdma
    )
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert said in found


MAKE = """
import json, os
from kvferry.worker.fabric.errors import FabricUnavailable
from kvferry.worker.fabric.nixl import NixlFabric
try:
    NixlFabric("agent").close()
    made = True
except FabricUnavailable:
    made = False
print()
print(json.dumps([made, os.environ.get("UCX_MM_ERROR_HANDLING")]))
"""


@pytest.mark.parametrize(
    ("transports", "setting"),
    [("all", None), ("tcp", None), ("sm,self", "y"), ("^tcp", "y")],
)
def test_the_defaults_reach_ucx_before_the_agent_is_made_without_a_warning(
    transports: str, setting: str | None
) -> None:
    """It warns of values that it cannot read, and of settings that nothing uses."""
    printed = output_of(MAKE, UCX_TLS=transports)
    assert json.loads(printed.splitlines()[-1]) == [True, setting]
    assert "UCX" not in printed


IDLE = f"""
import json, time, numpy
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.fabric.nixl import AgentConfig
from kvferry.worker.fabric.nixl import NixlFabric
memory = numpy.zeros(1 << 20, dtype=numpy.uint8)
fabrics = [NixlFabric(name, AgentConfig(**CONFIG)) for name in ("idle", "peer")]
for fabric in fabrics:
    fabric.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)])
fabrics[0].add_peer(fabrics[1].metadata())
start, cpu = time.monotonic(), time.process_time()
time.sleep({IDLE_S})
print(json.dumps((time.process_time() - cpu) / (time.monotonic() - start)))
for fabric in fabrics:
    fabric.close()
"""


@pytest.mark.parametrize("config", [{}, {"num_threads": 2}])
def test_an_idle_process_with_two_agents_takes_next_to_no_cpu(
    config: dict[str, object],
) -> None:
    """Seen: 0.003 cores. With the delay of 0 that NIXL's own Python wrapper sets: 0.47 … 0.79, on two busy cores."""
    assert answer_of(IDLE.replace("CONFIG", repr(config))) < MAX_IDLE_CORES


BINDINGS = """
import json, sys
sys.modules["BLOCKED"] = None
from kvferry.worker.fabric.nixl import load_bindings
print(json.dumps(load_bindings().__name__))
"""


@pytest.mark.parametrize(
    ("blocked", "found"), [("nixl_cu12", "nixl_cu13"), ("nixl_cu13", "nixl_cu12")]
)
def test_one_variant_of_the_bindings_is_enough(blocked: str, found: str) -> None:
    assert answer_of(BINDINGS.replace("BLOCKED", blocked)) == f"{found}._bindings"


def test_a_backend_that_is_not_installed_is_named() -> None:
    with pytest.raises(FabricUnavailable, match="no backend \\['PIGEON'\\]"):
        NixlFabric("agent", AgentConfig(backends=("UCX", "PIGEON")))


def test_a_backend_whose_libraries_are_missing_says_where_their_names_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bindings = load_bindings()

    class Agent:
        def __init__(self, *_: object) -> None: ...

        def getAvailPlugins(self) -> list[str]:  # noqa: N802
            return ["LIBFABRIC"]

        def createBackend(self, *_: object) -> None:  # noqa: N802
            raise bindings.nixlNotFoundError("NIXL_ERR_NOT_FOUND")

    monkeypatch.setattr(bindings, "nixlAgent", Agent)
    with pytest.raises(FabricUnavailable, match="NIXL_LOG_LEVEL=INFO names it"):
        NixlFabric("agent", AgentConfig(backends=("LIBFABRIC",)))


@pytest.mark.parametrize("name", ["", "x" * 256, "nul\0nul", "\udcff"])
def test_an_agent_name_that_cannot_travel_is_refused(name: str) -> None:
    with pytest.raises(InvalidFabricRequest):
        NixlFabric(name)


def test_without_nixl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(
        FabricUnavailable,
        match=r"package nixl is not usable.*pip install 'kvferry\[worker\]'",
    ):
        load_bindings()
