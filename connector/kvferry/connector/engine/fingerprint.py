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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

_SAMPLES = 4096
"""Samples in one file."""
_SAMPLE_BYTES = 256
_LONGEST_HEADER = 100 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
"""The files of the first pattern that matches are the weights."""
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
    plain = json.dumps([_of_the_model(config), extra], sort_keys=True, default=str)
    digest.update(plain.encode())
    files: list[Path] = []
    if weights is not None:
        files = _weight_files(weights)
    for file in files:
        for part in _parts(file):
            # The length first: without it, bytes could move from one part to the next without a change.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    if files:
        return f"weights:{digest.hexdigest()}"
    return f"config:{digest.hexdigest()}"


def local_model_dir(
    model: str, revision: str | None, download_dir: str | None
) -> Path | None:
    """The local path of a model's configuration: a folder, a file, or a snapshot in the hub's cache. Uses no network.

    vLLM downloads weights into `download_dir` and configurations into the default cache, whatever `download_dir` is. So
    both are searched.
    """
    if os.path.exists(model):
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        caches = dict.fromkeys((download_dir, None))
        for cache in caches:
            for name in _NAMES_OF_CONFIGS:
                file = try_to_load_from_cache(
                    model, name, revision=revision, cache_dir=cache
                )
                # It returns a marker, not a text, where the hub is known to have no such file.
                if isinstance(file, str):
                    return Path(file).parent
    except Exception as error:  # noqa: BLE001 - an invalid name for the hub must not stop the start
        logger.debug("no local files of %s: %s", model, error)
    return None


def local_weights_dir(
    model: str, revision: str | None, download_dir: str | None
) -> Path | None:
    """The local path of a model's weights: a directory, a file, or a snapshot in the hub's cache. Uses no network."""
    if os.path.exists(model):
        return Path(model)
    # The snapshot is looked for by its own path, not beside the configuration. With `download_dir` the configuration is
    # in another cache: searched there, two fine-tunes of one model had no weights and so one fingerprint, their
    # handshake passed, and every answer was wrong.
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        cache = Path(download_dir or constants.HF_HUB_CACHE)
        folder = cache / repo_folder_name(repo_id=model, repo_type="model")
        reference = folder / "refs" / (revision or constants.DEFAULT_REVISION)
        commit = str(revision)
        if reference.is_file():
            commit = reference.read_text().strip()
        snapshot = folder / "snapshots" / commit
        if snapshot.is_dir() and _weight_files(snapshot):
            return snapshot
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("no local weights of %s: %s", model, error)
    return local_model_dir(model, revision, download_dir)


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is missing, not readable or something else."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        logger.debug("nothing is read from %s: %s", file, error)
        return None
    if not isinstance(content, dict):
        return None
    return content


def _of_the_model(config: Any) -> Any:
    """A configuration without the keys that depend on this engine, also in nested ones (multimodal models)."""
    if not isinstance(config, dict):
        return config
    kept = {}
    for key, value in config.items():
        if key not in _NOT_THE_MODEL:
            kept[key] = _of_the_model(value)
    return kept


def _weight_files(weights: Path) -> list[Path]:
    """The weight files, sorted by name."""
    if weights.is_file():
        return [weights]
    for pattern in _WEIGHTS:
        files = sorted(path for path in weights.glob(pattern) if path.is_file())
        if files:
            return files
    return []


def _parts(file: Path) -> Iterator[bytes]:
    """What the fingerprint covers of a weight file: its name, size and header, and the samples."""
    size = file.stat().st_size
    yield file.name.encode()
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        layout = None
        if file.suffix == ".safetensors":
            layout = _read_safetensors(stream, size)
        if layout is None:
            layout = _TensorFile(b"", _evenly_spaced(size))
        yield layout.header
        for offset in layout.sample_offsets:
            stream.seek(offset)
            yield stream.read(_SAMPLE_BYTES)


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """A weight file's header, and where it is sampled."""

    header: bytes
    sample_offsets: list[int]


def _read_safetensors(stream: BinaryIO, size: int) -> _TensorFile | None:
    """The layout of a safetensors file: a sample in the middle of each tensor. None if it is not one."""
    header_bytes = int.from_bytes(stream.read(8), "little")
    if not 0 < header_bytes <= min(size - 8, _LONGEST_HEADER):
        return None
    header = stream.read(header_bytes)
    data_offset = 8 + header_bytes
    middles = []
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            middles.append((begin + end) // 2 + data_offset)
        middles.sort()
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None
    if not all(type(middle) is int and 0 <= middle <= size for middle in middles):
        return None
    step = max(1, -(-len(middles) // _SAMPLES))
    return _TensorFile(header, middles[::step])


def _evenly_spaced(size: int) -> list[int]:
    """Offsets of the samples of a file whose tensors are not known."""
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    return list(range(0, size, step))
