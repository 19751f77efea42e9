"""The parts of the GPU check as a table, and which of them can run on a machine. Standard library only.

A part is a command for bash, run with `$PART`, a folder of its own, where it leaves what is judged.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from scripts.accuracy.settings import TINY_MODEL
from scripts.gpu_check import judging
from scripts.gpu_check.machine import Gpu

_NO_PREFIX_CACHING = "--no-enable-prefix-caching"
"""For hybrids: with prefix caching vLLM's own CPU engine ends with a repeated prompt."""
_PLAIN_ROTATION = '--compilation-config,{"custom_ops":["-rotary_embedding"]}'
"""For MLA on a CPU: vLLM's kernel rotates the keys of a prefill wrongly (docs/compatibility.md, model kinds)."""
KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "small-mla": (
        "MLA",
        {"ATTENTION_BACKEND": "CPU_MLA", "VLLM_SERVE_EXTRA_ARGS": f"{_NO_PREFIX_CACHING},{_PLAIN_ROTATION}"},
    ),
    "small-mamba2-hybrid": ("Mamba-2 with attention", {}),
    "small-gdn-hybrid": ("gated delta net with attention", {"DTYPE": "bfloat16"}),
}
"""Models of random weights that need no hub: the kind, and what it needs on a CPU."""
_NONE: Mapping[str, str] = {}
_ENGINE_GIB = 8.0
_CACHE_BYTES = 2 << 30
"""Of an engine on a GPU. Fixed, because vLLM's measurement of free memory fails where two engines start on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        shows: in a line, for people.
        gpus: GPUs that it needs; `workers`, if more, share them.
        gib: free memory that each GPU must have.
        minutes: its deadline.
        quick: whether it is in the quick form.
        missing: what the chosen device lacks altogether.
    """

    name: str
    shows: str
    command: str
    judge: judging.Judge
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    workers: int = 0
    gib: float = 2.0
    minutes: float = 10.0
    quick: bool = True
    missing: str = ""

    @property
    def shell_line(self) -> str:
        """The command as a person would type it, `$PART` apart."""
        variables = (f"{name}={shlex.quote(value)} " for name, value in self.environment.items() if "$" not in value)
        return "".join(variables) + self.command


@dataclass(frozen=True, slots=True)
class Planned:
    """A part with the names of the GPUs that its workers get, or the reason why it is skipped."""

    part: Part
    gpus: tuple[str, ...] = ()
    skipped: str = ""


def plan(parts: Sequence[Part], gpus: Sequence[Gpu], *, quick: bool, only: Sequence[str] = ()) -> list[Planned]:
    """The parts with their GPUs. `only`: beginnings of the names of the parts that are wanted; none: all."""
    planned = []
    for part in parts:
        if only and not part.name.startswith(tuple(only)):
            continue
        fit = [gpu.name for gpu in gpus if gpu.free_gib >= part.gib]
        if part.missing:
            planned.append(Planned(part, skipped=f"needs {part.missing}"))
        elif quick and not part.quick:
            planned.append(Planned(part, skipped="not in the quick form"))
        elif len(fit) < part.gpus:
            devices = "a GPU" if part.gpus == 1 else f"{part.gpus} GPUs"
            needs = f"needs {devices} with {part.gib:g} GiB free; of {len(gpus)} found, {len(fit)} have that"
            planned.append(Planned(part, skipped=needs))
        else:
            planned.append(Planned(part, tuple(islice(cycle(fit), max(part.gpus, part.workers)))))
    return planned


def parts_for(device: str, *, quick: bool, models: Sequence[str] = ()) -> list[Part]:
    """All parts for a device, `cuda` or `cpu`, in the order in which they run: what takes little comes first.

    Args:
        models: more models for the accuracy test, by their names on a hub or folders.
    """
    on_gpu = device == "cuda"
    shorter = " --quick" if quick or not on_gpu else ""
    tests = "python -m pytest -q -p no:cacheprovider --junitxml=$PART/tests.xml"
    listener = "127.0.0.1:$((12000 + $$ % 20000))"
    sizes = "--max-size 64M --seconds 0.5" if not shorter else "--max-size 4M --seconds 0.1"
    small, large = (16, 64) if on_gpu else (32, 64)
    tiny: Mapping[str, str] = {"MODEL_NAMES": TINY_MODEL} if quick and not on_gpu else {}
    kernels = "cuda" if on_gpu else "reference" if quick else "reference or interpreter"
    return [
        Part(
            name="doctor",
            shows="versions, limits, devices, UCX; a loopback transfer in host and GPU memory",
            command="kvferry doctor --json --timeout 120 >$PART/doctor.json",
            judge=judging.doctor,
        ),
        Part(
            name="relayout: bytes",
            shows="the compiled kernel puts every byte in its place, rounds rightly, and touches no other byte",
            command=f"{tests} tests/worker/relayout/test_conformance.py -k '{kernels}'",
            judge=judging.tests,
            gib=8,
        ),
        Part(
            name="CUDA's rules",
            shows="streams, events, pinned memory and contexts are what kvferry takes them for",
            command=f"{tests} tests/worker/device/test_conformance.py -k '{'cuda' if on_gpu else 'stand-in'}'",
            judge=judging.tests,
        ),
        Part(
            name="relayout: bandwidth",
            shows="the kernel's share of a device copy's bandwidth, and its factor over layer by layer",
            command=f"python -m bench.relayout --device {device}{shorter}",
            judge=judging.benchmark,
            gib=2 if shorter else 40,
            minutes=20,
        ),
        Part(
            name="reads",
            shows="NIXL reads between two processes on one GPU, every byte compared, and over what (cuda_ipc)",
            command=(
                f"at={listener}; kvferry bench --listen $at --device {device} --max-size 64M --timeout 60 & "
                f"trap 'kill $! 2>/dev/null' EXIT; "
                f"kvferry bench --connect $at --device {device} {sizes} --timeout 60 --json >$PART/reads.json"
            ),
            judge=judging.reads,
        ),
        Part(
            name="cache probe",
            shows="what kvferry finds in the cache of every attention backend that vLLM starts here, MLA and FP8 too",
            command=f"python -m scripts.gpu_check.backends $PART/backends.json{' --quick' * quick}",
            judge=judging.backends,
            gib=_ENGINE_GIB,
            minutes=30,
        ),
        Part(
            name="handover",
            shows="a Llama-70B's cache from one process to another, beside bare NIXL and a plain copy",
            command=f"python -m bench.handover --device {device}{shorter}",
            judge=judging.benchmark,
            gib=4 if shorter else 48,
            minutes=20,
        ),
        _accuracy("one GPU", "two engines that share a GPU", device, tiny, quick=True, gpus=1),
        _accuracy("equal", "two equal engines", device, quick=on_gpu),
        *(
            _accuracy(f"TP {there} → {here}", "heads from or to two ranks", device, ranks(there, here), workers=3)
            for there, here in ((2, 1), (1, 2))
        ),
        *(
            _accuracy(f"blocks {there} → {here}", "other block sizes", device, blocks(there, here), gpus=1)
            for there, here in ((small, large), (large, small))
        ),
        *(
            _accuracy(
                f"{there} → {here}",
                "heads outermost (HND) and tokens outermost (NHD)",
                device,
                {"PREFILLER_KV_LAYOUT": there, "DECODER_KV_LAYOUT": here},
                gpus=1,
                missing="" if on_gpu else "a GPU: vLLM's CPU attention has one layout",
            )
            for there, here in (("HND", "NHD"), ("NHD", "HND"))
        ),
        *(
            _accuracy(
                kind,
                "a model of random weights",
                device,
                {"MODEL_NAMES": name, "VLLM_SERVE_EXTRA_ARGS": _NO_PREFIX_CACHING, **({} if on_gpu else needed)},
                gpus=1,
            )
            for name, (kind, needed) in KINDS.items()
        ),
        *(_accuracy(name, "the model that was asked for", device, {"MODEL_NAMES": name}, gpus=1) for name in models),
        Part(
            name="beside NixlConnector",
            shows="handover, first token and throughput of two engines behind vllm-router, beside vLLM's NixlConnector",
            command=f"python -m bench.serve --device {device} --quick",
            judge=judging.benchmark,
            workers=2,
            gib=4 * _ENGINE_GIB if on_gpu else 6,
            minutes=40,
            quick=False,
        ),
    ]


def ranks(there: int, here: int) -> dict[str, str]:
    """Variables of the accuracy test for tensor parallel sizes of the prefill and the decode engine."""
    return {"MODEL_NAMES": TINY_MODEL, "PREFILLER_TP_SIZE": str(there), "DECODER_TP_SIZE": str(here)}


def blocks(there: int, here: int) -> dict[str, str]:
    """The same for block sizes."""
    return {"PREFILL_BLOCK_SIZE": str(there), "DECODE_BLOCK_SIZE": str(here)}


def _accuracy(
    name: str,
    shows: str,
    device: str,
    variables: Mapping[str, str] = _NONE,
    *,
    gpus: int = 2,
    workers: int = 2,
    quick: bool = False,
    missing: str = "",
) -> Part:
    """The accuracy test with these variables."""
    environment = {"LOG_DIR": "$PART", "KVFERRY_DEVICE": device, **variables}
    if device == "cuda":
        given = environment.get("VLLM_SERVE_EXTRA_ARGS", "")
        environment["VLLM_SERVE_EXTRA_ARGS"] = f"--kv-cache-memory-bytes,{_CACHE_BYTES},{given}"
    elif workers > 2:  # three workers on two cores wait for each other
        environment["KV_CONNECTOR_EXTRA_CONFIG"] = '{"kv_lease_duration": 120, "handshake_timeout_s": 60}'
    return Part(
        name=f"accuracy: {name}",
        shows=f"the tokens of a single engine: {shows}",
        command="python -m scripts.accuracy",
        judge=judging.accuracy,
        environment=environment,
        gpus=gpus,
        workers=workers,
        gib=2 * _ENGINE_GIB if device == "cuda" else 2.0,
        minutes=30,
        quick=quick,
        missing=missing,
    )
