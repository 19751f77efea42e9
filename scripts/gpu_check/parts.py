"""The parts of the GPU check: commands for bash, and on which GPUs each can run. Standard library only.

A part is run with `$PART`, a folder of its own, where the accuracy test and benchmarks write too. It is judged by its
exit status and by its log.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from scripts.accuracy.settings import TINY_MODEL
from scripts.gpu_check.gpus import Gpu

_PYTEST = "python -m pytest -q -p no:cacheprovider"
_NONE_PASSED = r"^(?!.* passed).* in [0-9.]+s.*$"
_MISSED = r"^.* MISSED .*$"
_NO_GO = r"^NO GO.*$"
_FINDINGS = r"^ *(?:look|not done) .*$"
_OTHER_ENDED = r"^- .*(?: ended early: | [0-9]+ of [0-9]+ failed: ).*$"
_KVFERRY_ENDED = f"(?=- kvferry){_OTHER_ENDED}"
_SLOW_READS = r"^GPU +4 MiB +1 +[0-9]+ +[0-9](?:\.[0-9]+)? .*$"
"""Below 10 GB/s: through host memory. The transports that UCX names are the same over CUDA IPC."""
_NO_PREFIX_CACHING = "--no-enable-prefix-caching"
"""For hybrids: with prefix caching vLLM's own CPU engine ends with a repeated prompt."""
_TRITON_GDN = '--additional-config,{"gdn_prefill_backend":"triton"}'
"""On Hopper vLLM takes flashinfer for the prefill of gated delta nets without looking whether it is installed."""
_PLAIN_ROTATION = '--compilation-config,{"custom_ops":["-rotary_embedding"]}'
"""For MLA on a CPU: vLLM's kernel rotates the keys of a prefill wrongly (docs/compatibility.md, model kinds)."""
_CACHE_BYTES = f"--kv-cache-memory-bytes,{2 << 30}"
"""Of an engine on a GPU. Fixed, because vLLM's measurement of free memory fails where two engines start on one GPU."""


_UTILIZATION = "0.05"
"""vLLM does not start where a smaller share of the GPU's memory is free, whatever it needs."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        command: exit status 0 is success.
        gib: free memory that each GPU must have.
        gpus: GPUs that it needs; `workers`, if more, share them.
        minutes: its deadline.
        quick: whether it is in the quick form.
        fails: a pattern of lines of the log that are a failure all the same.
        look: a pattern of lines that are to be looked at.
    """

    name: str
    command: str
    gib: float = 2.0
    gpus: int = 1
    workers: int = 1
    minutes: float = 10.0
    quick: bool = True
    fails: str = ""
    look: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A part with the names of the GPUs that its workers get, or the reason why it is skipped."""

    part: Part
    gpus: tuple[str, ...] = ()
    skipped: str = ""


def parts_for(
    device: str, *, quick: bool, models: Sequence[str] = (), random_models: bool = False
) -> list[Part]:
    """All parts for a device, `cuda` or `cpu`, in the order in which they run: what takes little comes first.

    Args:
        models: more models for the accuracy test, by their names on a hub or folders.
        random_models: the accuracy test uses no model but those with random weights.
    """
    gpu = device == "cuda"
    small = quick or not gpu
    less, sizes = (" --quick", "4M --seconds 0.1") if small else ("", "64M")
    kernels, contract = ("cuda", "cuda") if gpu else ("reference", "stand-in")
    bench = f"kvferry bench --device {device} --timeout 60"
    at = "127.0.0.1:$((12000 + $$ % 20000))"
    missed = _MISSED if gpu else ""
    parts = [
        *(_dead_exporter_parts(quick) if gpu else ()),
        Part("doctor", "kvferry doctor --timeout 120", look=_FINDINGS if gpu else ""),
        Part(
            "relayout: bytes",
            f"{_PYTEST} tests/worker/relayout/test_conformance.py -k '{kernels}'",
            gib=8,
            fails=_NONE_PASSED,
        ),
        Part(
            "CUDA's rules",
            f"{_PYTEST} tests/worker/device/test_conformance.py -k '{contract}'",
            fails=_NONE_PASSED,
        ),
        Part(
            "relayout: bandwidth",
            f"python -m bench.relayout --device {device}{less}",
            gib=2 if small else 40,
            minutes=20,
            look=missed,
        ),
        Part(
            "reads",
            f"at={at}; {bench} --listen $at & {bench} --connect $at --max-size {sizes}",
            look=_SLOW_READS if gpu else "",
        ),
        Part(
            "pairs: bytes",
            f"{_PYTEST} tests/rig/test_named_pairs.py tests/rig/test_random_pairs.py tests/rig/test_streams.py"
            f" --device {device}",
            fails=_NONE_PASSED,
        ),
        Part(
            "cache probe",
            f"python -m scripts.gpu_check.backends {device}{' --quick' * quick}",
            gib=8,
            minutes=30,
            look="^.* moved whole: .*$",
        ),
        Part(
            "handover",
            f"python -m bench.handover --device {device}{less}",
            gib=4 if small else 48,
            minutes=20,
            look=missed,
        ),
        *(_mapped_parts(small) if gpu else ()),
    ]
    parts += _accuracy_parts(device, quick, models, random_models)
    serve = f"python -m bench.serve --device {device} --quick"
    look = f"{_OTHER_ENDED}|{_MISSED}" if gpu else _OTHER_ENDED
    gib = 32 if gpu else 6
    return [
        *parts,
        Part(
            "beside NixlConnector",
            serve,
            gib,
            1,
            2,
            40,
            quick=False,
            fails=_KVFERRY_ENDED,
            look=look,
        ),
    ]


def _dead_exporter_parts(quick: bool) -> list[Part]:
    """First of all: what they find decides whether CUDA IPC is used by default."""
    kills = 100 if quick else 1000
    command = f"python scripts/gpu_check/dead_exporter.py --kills {kills}"
    shared: dict[str, Any] = {"gib": 4.0, "minutes": 40.0, "look": _NO_GO}
    return [
        Part("dead exporter", command, **shared),
        Part(
            "dead exporter: two GPUs", f"{command} --exporter-gpu 1", gpus=2, **shared
        ),
    ]


def _mapped_parts(small: bool) -> list[Part]:
    """Caches on a GPU that are mapped, which is off by default: its bytes, and its speed."""
    less = " --quick" * small
    return [
        Part(
            "mapped: bytes",
            f"{_PYTEST} tests/worker/peer_memory/test_conformance.py -k 'cuda'",
            fails=_NONE_PASSED,
        ),
        Part(
            "mapped: handover",
            f"python -m bench.handover --device cuda --mapped{less}",
            gib=4 if small else 48,
            minutes=30,
        ),
        Part(
            "mapped: beside a decoder",
            f"python -m bench.mapped_beside{less}",
            gib=10,
            look=_MISSED,
        ),
    ]


def _accuracy_parts(
    device: str, quick: bool, models: Sequence[str], random_models: bool
) -> list[Part]:
    gpu = device == "cuda"

    def part(
        name: str,
        variables: dict[str, str],
        gpus: int = 1,
        workers: int = 2,
        *,
        quick: bool = False,
    ) -> Part:
        if gpu:
            arguments = [_CACHE_BYTES, variables.get("VLLM_SERVE_EXTRA_ARGS", "")]
            variables = {
                **variables,
                "VLLM_SERVE_EXTRA_ARGS": ",".join(filter(None, arguments)),
            }
            variables["GPU_MEMORY_UTILIZATION"] = _UTILIZATION
        if random_models:
            variables = {**tiny, **variables}
        assigned = "".join(
            f"{variable}={shlex.quote(value)} " for variable, value in variables.items()
        )
        command = f"{assigned}python -m scripts.accuracy"
        return Part(
            f"accuracy: {name}", command, 16 if gpu else 2, gpus, workers, 30, quick
        )

    small, large = "16" if gpu else "32", "64"
    tiny = {"MODEL_NAMES": TINY_MODEL}
    # On two cores three workers wait for each other.
    patient = (
        {}
        if gpu
        else {
            "KV_CONNECTOR_EXTRA_CONFIG": '{"kv_lease_duration": 120, "handshake_timeout_s": 60}'
        }
    )
    plain = {"VLLM_SERVE_EXTRA_ARGS": _NO_PREFIX_CACHING}
    gdn = (
        {"VLLM_SERVE_EXTRA_ARGS": f"{_NO_PREFIX_CACHING},{_TRITON_GDN}"}
        if gpu
        else plain
    )
    on_cpu = {
        "ATTENTION_BACKEND": "CPU_MLA",
        "VLLM_SERVE_EXTRA_ARGS": f"{_NO_PREFIX_CACHING},{_PLAIN_ROTATION}",
    }
    layouts = [
        part("HND → NHD", {"PREFILLER_KV_LAYOUT": "HND", "DECODER_KV_LAYOUT": "NHD"}),
        part("NHD → HND", {"PREFILLER_KV_LAYOUT": "NHD", "DECODER_KV_LAYOUT": "HND"}),
    ]
    return [
        part("one GPU", tiny if quick and not gpu else {}, quick=True),
        part("equal", {}, 2, quick=gpu),
        part("TP 2 → 1", {**tiny, **patient, "PREFILLER_TP_SIZE": "2"}, 2, 3),
        part("TP 1 → 2", {**tiny, **patient, "DECODER_TP_SIZE": "2"}, 2, 3),
        part(
            f"blocks {small} → {large}",
            {"PREFILL_BLOCK_SIZE": small, "DECODE_BLOCK_SIZE": large},
        ),
        part(
            f"blocks {large} → {small}",
            {"PREFILL_BLOCK_SIZE": large, "DECODE_BLOCK_SIZE": small},
        ),
        *(layouts if gpu else ()),  # vLLM's CPU attention has one layout
        part("MLA", {"MODEL_NAMES": "small-mla", **(plain if gpu else on_cpu)}),
        part("Mamba-2", {"MODEL_NAMES": "small-mamba2-hybrid", **plain}),
        part(
            "gated delta net",
            {"MODEL_NAMES": "small-gdn-hybrid", "DTYPE": "bfloat16", **gdn},
        ),
        *(part(name, {"MODEL_NAMES": name}) for name in models),
    ]


def plan(
    parts: Sequence[Part], gpus: Sequence[Gpu], *, quick: bool, only: Sequence[str] = ()
) -> list[Planned]:
    """The parts with their GPUs. `only`: beginnings of the names of the parts that are wanted; none: all."""
    planned = []
    for part in parts:
        if only and not part.name.startswith(tuple(only)):
            continue
        fit = [gpu.name for gpu in gpus if gpu.free_gib >= part.gib]
        if quick and not part.quick:
            planned.append(Planned(part, skipped="not in the quick form"))
        elif len(fit) < part.gpus:
            devices = "a GPU" if part.gpus == 1 else f"{part.gpus} GPUs"
            needs = f"needs {devices} with {part.gib:g} GiB free; of {len(gpus)} found, {len(fit)} have that"
            planned.append(Planned(part, skipped=needs))
        else:
            planned.append(
                Planned(part, tuple(islice(cycle(fit), max(part.gpus, part.workers))))
            )
    return planned
