"""LoRA adapters by their content.

Two engines may have different versions of an adapter under one name, e.g. while a new version is rolled out. So what a
prompt's digests contain of an adapter is a digest of its files, not its name.

The engine runs with what it has loaded, and does not tell when that was. It loads an adapter once under its number
(`lora_int_id`), or before every step (`load_inplace`). And vLLM keeps blocks in its prefix cache by the adapter's name,
whatever its content. So the content of the files is only known to be that of the blocks if

- it is what was first seen under the number, unless the adapter is loaded in place, and
- it is all that was seen under the name since the prefix cache was emptied.

Otherwise the content is unknown, and no other engine shares a token of such a prompt: it is computed where it is
decoded, which is slower and never wrong.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.connector.engine.fingerprint import fingerprint, local_model_dir, read_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In vLLM's order: it reads the first one that is there."""
_NOT_THE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)
"""Keys of an adapter's configuration that name the place of its model or the library that wrote it."""

_Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """The contents of the adapters of one engine. Not thread-safe.

    Its dictionaries have one entry per adapter that an operator has loaded.

    Args:
        scope: the options that change what an adapter does; engines with other options share none.
        has_prefix_cache: whether blocks of an adapter's earlier content may be used again.
    """

    def __init__(self, scope: str = "", *, has_prefix_cache: bool = True) -> None:
        self._scope = scope
        self._has_prefix_cache = has_prefix_cache
        self._unknown = f"unknown:{secrets.token_hex(16)}"
        self._digests: dict[str, tuple[_Stamp, str]] = {}
        self._by_number: dict[int, str] = {}
        self._by_name: dict[str, str] = {}
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Adapters:
        """Those of an engine."""
        lora: Any = vllm_config.lora_config
        has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        if lora is None:
            return cls(has_prefix_cache=has_prefix_cache)
        options = {
            "dtype": str(lora.lora_dtype),
            "target_modules": sorted(lora.target_modules or ()),
            "tower": lora.enable_tower_connector_lora,
            "mixed_moe": lora.enable_mixed_moe_lora_format,
            "shared_moe": lora.enable_moe_shared_loras,
        }
        return cls(str(options), has_prefix_cache=has_prefix_cache)

    def content_of(self, request: LoRARequest | None) -> str | None:
        """A text that two engines share if they run with equal adapters; None without an adapter.

        The files are only looked at (some 30 µs) where they are unchanged. New ones are read in part, as `fingerprint`
        does, by the thread that calls this: vLLM too reads a new adapter within a step, and all of it.
        """
        if request is None:
            return None
        number, name = request.lora_int_id, request.lora_name
        found = self._digest(request)
        if found is None:
            found = None if request.load_inplace else self._by_number.get(number)
            if found is None:
                return self._report(name, "its files are not on this machine, or cannot be read")
        if not request.load_inplace and self._by_number.setdefault(number, found) != found:
            return self._report(
                name, "its files have changed since it was loaded; load it from another path"
            )
        if self._has_prefix_cache and self._by_name.setdefault(name, found) != found:
            return self._report(
                name, "it has changed, and blocks of before are cached; reset the prefix cache"
            )
        return found

    def reset(self) -> None:
        """vLLM's prefix cache has been emptied, or is about to be."""
        self._by_name.clear()
        self._reported.clear()

    def _digest(self, request: LoRARequest) -> str | None:
        path = request.lora_path
        directory = local_model_dir(os.path.expanduser(path), None, None)
        try:
            stamp = _stamp(directory) if directory is not None else ()
            if directory is None or not stamp:
                return None
            known = self._digests.get(path)
            if known is None or known[0] != stamp:
                known = stamp, _read(directory)
                self._digests[path] = known
        except OSError as error:
            logger.debug("adapter %s: %r", path, error)
            return None
        return f"{known[1]} {request.is_3d_lora_weight} {self._scope}"

    def _report(self, name: str, reason: str) -> str:
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            logger.warning(
                "adapter %s: prompts are computed where they are decoded: %s", name, reason
            )
        return self._unknown


def _stamp(directory: Path) -> _Stamp:
    """What changes when a file is written or replaced; empty without weights."""
    found = []
    for name in (_CONFIG, *_WEIGHTS):
        try:
            status = os.stat(directory / name)
        except FileNotFoundError:
            continue
        found.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
    has_weights = any(name in _WEIGHTS for name, *_ in found)
    return tuple(found) if has_weights else ()


def _read(directory: Path) -> str:
    config = read_json(directory / _CONFIG) or {}
    weights = next(path for name in _WEIGHTS if (path := directory / name).is_file())
    return fingerprint(
        {key: value for key, value in config.items() if key not in _NOT_THE_ADAPTER}, weights
    )
