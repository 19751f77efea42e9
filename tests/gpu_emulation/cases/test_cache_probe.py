"""The cache probe under every attention backend that vLLM considers on a Hopper GPU."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_emulation.engines import Settings
from tests.vllm.forked_engine import EngineFailed, ForkedEngine

K_AND_V = ("small-llama-8", {"head_dim": 128}, {"k", "v"})
MLA = ("small-mla", {"num_attention_heads": 16, "num_key_value_heads": 16}, {"mla"})
FOUND = {
    "FLASH_ATTN": K_AND_V,
    "TRITON_ATTN": K_AND_V,
    "FLEX_ATTENTION": K_AND_V,
    "FLASH_ATTN_MLA": MLA,
    "FLASHMLA": MLA,
    "TRITON_MLA": MLA,
}
"""By backend the model, what differs from it, and the kinds of tensors that the probe finds."""
NOT_INSTALLED = {"FLASHINFER": K_AND_V, "FLASHINFER_MLA": MLA}
LIST = "from scripts.gpu_check.backends import cases; print([name for _, name, _ in cases(quick=True)])"


def settings(backend: str, overrides: dict[str, int], description: Path) -> Settings:
    return Settings(
        backend=backend,
        dtype="bfloat16",
        block_size=64,
        engine_args={"load_format": "dummy", "hf_overrides": overrides},
        extra_config={"description_file": str(description)},
    )


@pytest.mark.parametrize("backend", FOUND)
def test_probe_recognises(backend: str, logs: Path) -> None:
    model, overrides, kinds = FOUND[backend]
    description = logs / f"{backend}.json"
    spec = settings(backend, overrides, description).spec(
        f"probe-{backend}", model, "kv_both"
    )
    with ForkedEngine(spec, logs) as engine:
        assert f"AttentionBackendEnum.{backend} backend" in engine.log_path.read_text()
    (worker,) = json.loads(description.read_text())["workers"]
    assert {tensor["kind"] for tensor in worker["tensors"]} == kinds
    assert {tensor["format"]["dtype"] for tensor in worker["tensors"]} == {"bfloat16"}


@pytest.mark.parametrize("backend", NOT_INSTALLED)
def test_backend_does_not_start(backend: str, logs: Path) -> None:
    """When this fails, the backend belongs to those above."""
    model, overrides, _ = NOT_INSTALLED[backend]
    spec = settings(backend, overrides, logs / "none.json").spec(
        f"probe-{backend}", model, "kv_both"
    )
    with (
        pytest.raises(
            EngineFailed, match="ModuleNotFoundError: No module named 'flashinfer'"
        ),
        ForkedEngine(spec, logs),
    ):
        pass


def test_no_backend_is_left_out() -> None:
    """Those that the GPU check tries."""
    said = subprocess.run(
        [sys.executable, "-c", LIST],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    names = ast.literal_eval(said.stdout.splitlines()[-1])
    assert set(names) == {*FOUND, *NOT_INSTALLED}
