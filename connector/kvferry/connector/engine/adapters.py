"""LoRA adapters by their content.

Two engines may have different versions of an adapter under one name, e.g. while a new version is rolled out. So a
prompt's digests contain a digest of the adapter's files, not its name.

The files need not be what the blocks were computed with: `Adapters.content_of` decides that. Where the content of the
blocks is unknown, the prompt shares no token with any other engine. It is computed where it is decoded, which is slower
and never wrong.
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
    {
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "auto_mapping",
    }
)
"""Keys of an adapter's configuration that name the place of its model or the library that wrote it."""

_Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """The contents of the adapters of one engine. Not thread-safe.

    Its dictionaries have one entry per adapter that an operator has loaded.

    Args:
        scope: the options that change what an adapter does; engines with other options share none.
        has_prefix_cache: whether blocks of an adapter's earlier content may be used again.

    Attributes:
        num_replaced: how often an adapter was found to have another content than before, under a name by which blocks
            of both are cached.
    """

    def __init__(self, scope: str = "", *, has_prefix_cache: bool = True) -> None:
        self.num_replaced = 0
        self._scope = scope
        self._has_prefix_cache = has_prefix_cache
        self._unknown = f"unknown:{secrets.token_hex(16)}"
        self._digests: dict[str, tuple[_Stamp, str]] = {}
        self._by_number: dict[int, str] = {}
        self._by_name: dict[str, str] = {}
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> Adapters:
        """The adapters of an engine with this configuration."""
        lora: Any = vllm_config.lora_config
        has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        if lora is None:
            return cls(has_prefix_cache=has_prefix_cache)
        # What a file's weights do to the model depends on these, so equal files under other options are other content.
        options = {
            "dtype": str(lora.lora_dtype),
            "target_modules": sorted(lora.target_modules or ()),
            "tower": lora.enable_tower_connector_lora,
            "mixed_moe": lora.enable_mixed_moe_lora_format,
            "shared_moe": lora.enable_moe_shared_loras,
        }
        return cls(str(options), has_prefix_cache=has_prefix_cache)

    def content_of(self, request: LoRARequest) -> str:
        """A text that two engines share if they run with equal adapters.

        Unchanged files are only looked at (some 30 µs). New ones are read in part, as `fingerprint` does, by the
        calling thread. That is the engine's own: vLLM too reads a new adapter within a step, and all of it.
        """
        number = request.lora_int_id
        name = request.lora_name
        content = self._content_of_files(request)
        if content is None and not request.load_inplace:
            # The files may be gone, e.g. after a roll-out: the engine still runs with what it has loaded.
            content = self._by_number.get(number)
        if content is None:
            return self._report(
                name, "its files are not on this machine, or cannot be read"
            )
        # The engine loads an adapter once under its number and does not tell when, or with `load_inplace` before every
        # step. So only the content that was first seen under a number is known to be loaded, and none is known any more
        # once another one was loaded in its place.
        loaded = self._by_number.setdefault(number, content)
        if content != loaded:
            if not request.load_inplace:
                return self._report(
                    name,
                    "its files have changed since it was loaded; load it from another path",
                )
            self._by_number[number] = self._unknown
        if self._has_prefix_cache:
            # vLLM finds cached blocks by the adapter's name, whatever its content was. One name may have only one
            # content until the cache is emptied, or blocks of the old one would be served under the new digest.
            cached = self._by_name.setdefault(name, content)
            if content != cached:
                if cached != self._unknown:
                    self.num_replaced += 1
                # Also if the content of before comes back: blocks of this one are cached by then.
                self._by_name[name] = self._unknown
                return self._report(
                    name,
                    "it has changed, and blocks of before are cached; reset the prefix cache",
                )
        return content

    def reset(self) -> None:
        """vLLM's prefix cache has been emptied, or is about to be."""
        self._by_name.clear()
        self._reported.clear()

    def _content_of_files(self, request: LoRARequest) -> str | None:
        """The content of an adapter's files as they are now; None if they cannot be read."""
        path = request.lora_path
        directory = local_model_dir(os.path.expanduser(path), None, None)
        if directory is None:
            return None
        try:
            digest = self._digest(path, directory)
        except Exception as error:  # noqa: BLE001 - asked within a step, which must not end the engine
            logger.debug("adapter %s: %r", path, error)
            return None
        if digest is None:
            return None
        return f"{digest} {request.is_3d_lora_weight} {self._scope}"

    def _digest(self, path: str, directory: Path) -> str | None:
        """The digest of an adapter's files, read again only if their stamp has changed; None without weights.

        Raises:
            Exception: a file cannot be read, is gone again, or has another content than an adapter's.
        """
        stamp = _stamp(directory)
        if not stamp:
            return None
        known = self._digests.get(path)
        if known is not None:
            known_stamp, known_digest = known
            if known_stamp == stamp:
                return known_digest
        digest = _read(directory)
        self._digests[path] = (stamp, digest)
        return digest

    def _report(self, name: str, reason: str) -> str:
        """Log once why an adapter's content is unknown. Returns a text that no other engine has."""
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            logger.warning(
                "adapter %s: its prompts are not handed over: %s",
                name,
                reason,
            )
        return self._unknown


def _stamp(directory: Path) -> _Stamp:
    """What changes when a file is written or replaced; empty without weights."""
    files = []
    has_weights = False
    for name in (_CONFIG, *_WEIGHTS):
        try:
            status = os.stat(directory / name)
        except FileNotFoundError:
            continue
        # With the inode, because a file that is moved into place may have the old size and time.
        files.append((name, status.st_size, status.st_mtime_ns, status.st_ino))
        has_weights = has_weights or name in _WEIGHTS
    return tuple(files) if has_weights else ()


def _read(directory: Path) -> str:
    """The digest of an adapter's configuration and weights; some weights must be there."""
    config = read_json(directory / _CONFIG) or {}
    for key in _NOT_THE_ADAPTER:
        config.pop(key, None)
    candidates = (directory / name for name in _WEIGHTS)
    weights = next(path for path in candidates if path.is_file())
    return fingerprint(config, weights)
