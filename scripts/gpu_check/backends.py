"""The cache probe on every attention backend that vLLM offers on this machine.

    python -m scripts.gpu_check.backends DEVICE [--quick]

Each backend gets an engine of its own, of one small model without weights, with the connector: what it found is in the
engine's `description_file`. One that does not start is started once more without the connector, to tell whose fault
it is. Which backends there are is asked of vLLM; those of sparse attention need models of their own and are left out.
`--quick` leaves out caches of FP8. Exit status: 0 unless kvferry stopped an engine, or none started.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.accuracy.engines import Engine, EngineSpec, Transfer
from scripts.accuracy.model import default_cache_dir, prepare
from scripts.accuracy.processes import ServerFailed
from scripts.accuracy.settings import TINY_MODEL

_LEFT_OUT = ("SPARSE", "TURBOQUANT")
"""Backends of models and of caches that are not tried here."""
_OVERRIDES: dict[str, dict[str, Any]] = {
    # what all backends can do: heads of 128, 16 heads of MLA
    TINY_MODEL: {"head_dim": 128},
    "small-mla": {"num_attention_heads": 16, "num_key_value_heads": 16},
}
_ERROR = re.compile(r"\w*(?:Error|Exception|Config|Refused): .*")


def cases(*, quick: bool) -> Iterator[tuple[str, str, str]]:
    """Model, backend and dtype of the cache (`auto`: the model's), as vLLM considers them here, most wanted first."""
    from vllm.platforms import current_platform as platform

    for model in _OVERRIDES:
        mla = model == "small-mla"
        for cache in ("auto",) if quick else ("auto", "fp8"):
            for backend in (
                ["CPU_MLA" if mla else "CPU_ATTN"]
                if platform.is_cpu()
                else _considered(mla, cache)
            ):
                if not any(word in backend for word in _LEFT_OUT):
                    yield model, backend, cache


def _considered(mla: bool, cache: Any) -> list[str]:
    import torch
    from vllm.platforms import current_platform as platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=576 if mla else 128,
        dtype=torch.bfloat16,
        kv_cache_dtype=cache,
        block_size=None,
        use_mla=mla,
    )
    valid, refused = platform.get_valid_backends(
        platform.get_device_capability(), config, 16
    )
    return [one.backend.name for one in valid] + [one.name for one in refused]


def probe(
    model: str, backend: str, cache: str, device: str, folder: Path
) -> tuple[str, str]:
    """What became of an engine: `recognised`, `moved whole`, `stopped by kvferry` or `not started by vLLM`; and what
    was found in its cache, or the error."""
    description = folder / f"{backend}-{cache}.json"
    arguments = [
        "--load-format",
        "dummy",
        "--kv-cache-dtype",
        cache,
        "--num-gpu-blocks-override",
        "64",
    ]
    if (
        device == "cuda"
    ):  # not by vLLM's look at free memory, of which a shared GPU may have little
        arguments += ["--kv-cache-memory-bytes", str(1 << 30)]
    spec = EngineSpec(
        name=f"{backend}-{cache}",
        model=prepare(model, default_cache_dir(), print),
        device=device,
        dtype="bfloat16",
        attention_backend=backend,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.05,
        transfer=Transfer(
            "kv_both", extra_config={"description_file": str(description)}
        ),
        extra_args=(*arguments, "--hf-overrides", json.dumps(_OVERRIDES[model])),
    )
    if error := _start(spec, folder):
        alone = replace(spec, name=f"{spec.name}-alone", transfer=None)
        return "not started by vLLM" if _start(
            alone, folder
        ) else "stopped by kvferry", error
    (worker,) = json.loads(description.read_text())["workers"]
    kinds = dict.fromkeys(one["kind"] for one in worker["tensors"])
    formats = dict.fromkeys(
        " ".join(map(str, one["format"].values())) for one in worker["tensors"]
    )
    result = (
        "recognised" if kinds and kinds.keys() <= {"k", "v", "mla"} else "moved whole"
    )
    return result, f"{', '.join(kinds)}: {'; '.join(formats)}"


def _start(spec: EngineSpec, folder: Path) -> str:
    """Start an engine and end it. Returns its first error, or nothing."""
    try:
        with Engine(spec, folder) as engine:
            engine.wait_ready(300)
    except ServerFailed as failed:
        found = _ERROR.search((folder / f"{spec.name}.log").read_text(errors="replace"))
        return (found[0] if found else str(failed).partition("\n")[0])[:300]
    return ""


def main() -> int:
    """Entry point."""
    counts: Counter[str] = Counter()
    for model, backend, cache in cases(quick="--quick" in sys.argv):
        result, found = probe(
            model, backend, cache, sys.argv[1], Path(os.environ.get("PART", "."))
        )
        counts[result] += 1
        print(f"{backend} {cache} {result}: {found}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(
        bool(counts["stopped by kvferry"])
        or not counts["recognised"] + counts["moved whole"]
    )


if __name__ == "__main__":
    sys.exit(main())
