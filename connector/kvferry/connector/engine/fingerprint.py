"""A fingerprint of the weights that an engine serves, made without reading all of them.

It covers every weight file's size and header, and a sample of every tensor (at most 4,096 per file, evenly chosen, 256
bytes from the middle of each). A fine-tune changes nearly every tensor, so it changes the fingerprint; a deliberate
edit between the samples would not. The model's configuration is compared key by key instead, see `settings`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

_SAMPLES = 4096
_SAMPLE_BYTES = 256
_LONGEST_HEADER = 100 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_NAMES_OF_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def fingerprint(config: dict[str, Any], weights: Path | None, extra: str = "") -> str:
    """The fingerprint of a model, e.g. `weights:3f0c…` or, without weight files, `config:91ab…`.

    Args:
        config: plain objects that belong to the weights, e.g. an adapter's configuration.
        weights: the directory of the weight files, or the one weight file, or None.
        extra: anything else that determines the weights, e.g. a seed.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvferry-model-1")
    digest.update(json.dumps([_of_the_model(config), extra], sort_keys=True, default=str).encode())
    files = _weight_files(weights) if weights is not None else []
    for file in files:
        for part in _parts(file):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return f"{'weights' if files else 'config'}:{digest.hexdigest()}"


def local_model_dir(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The local path of a model's configuration: a folder, a file, or a snapshot in the hub's cache. Uses no network.

    vLLM downloads weights into `download_dir` and configurations into the default cache, whatever `download_dir` is.
    """
    if os.path.exists(model):
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        for cache in dict.fromkeys((download_dir, None)):
            for name in _NAMES_OF_CONFIGS:
                found = try_to_load_from_cache(model, name, revision=revision, cache_dir=cache)
                if isinstance(found, str):
                    return Path(found).parent
    except Exception as error:  # noqa: BLE001 - an invalid name for the hub must not stop the start
        logger.debug("no local files of %s: %s", model, error)
    return None


def local_weights_dir(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The local path of a model's weights: a directory, a file, or a snapshot in the cache that vLLM downloads weights
    into, which may have no configuration. Uses no network."""
    if os.path.exists(model):
        return Path(model)
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = Path(download_dir or constants.HF_HUB_CACHE) / repo_folder_name(
            repo_id=model, repo_type="model"
        )
        reference = folder / "refs" / (revision or constants.DEFAULT_REVISION)
        commit = reference.read_text().strip() if reference.is_file() else str(revision)
        snapshot = folder / "snapshots" / commit
        if snapshot.is_dir() and _weight_files(snapshot):
            return snapshot
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("no local weights of %s: %s", model, error)
    return local_model_dir(model, revision, download_dir)


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is missing, not readable or something else."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        logger.debug("nothing is read from %s: %s", file, error)
        return None
    return found if isinstance(found, dict) else None


def _of_the_model(config: Any) -> Any:
    """A configuration without the keys that depend on this engine, also in nested ones (multimodal models)."""
    if not isinstance(config, dict):
        return config
    return {key: _of_the_model(value) for key, value in config.items() if key not in _NOT_THE_MODEL}


def _weight_files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    for pattern in _WEIGHTS:
        found = sorted(path for path in directory.glob(pattern) if path.is_file())
        if found:
            return found
    return []


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield file.name.encode()
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        header, offsets = (
            _safetensors(stream, size) if file.suffix == ".safetensors" else (b"", None)
        )
        yield header
        for offset in offsets if offsets is not None else _evenly(0, size):
            stream.seek(offset)
            yield stream.read(_SAMPLE_BYTES)


def _safetensors(stream: BinaryIO, size: int) -> tuple[bytes, list[int] | None]:
    """The header of a safetensors file and the offsets of its samples; (b"", None) for any other file."""
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(size - 8, _LONGEST_HEADER):
        return b"", None
    header = stream.read(length)
    try:
        entries = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        middles = sorted((begin + end) // 2 + 8 + length for begin, end in spans)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return b"", None
    if not all(type(middle) is int and 0 <= middle <= size for middle in middles):
        return b"", None
    step = max(1, -(-len(middles) // _SAMPLES))
    return header, middles[::step]


def _evenly(start: int, stop: int) -> list[int]:
    step = max(_SAMPLE_BYTES, (stop - start) // _SAMPLES)
    return list(range(start, stop, step))
