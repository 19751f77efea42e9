"""LoRA adapters are compared by what they do, not by their names."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvferry.connector.engine.adapters import Adapters
from tests.connector.test_fingerprint import safetensors

_writes = itertools.count(1)


def adapter(folder: Path, fill: int = 1, **config: Any) -> Path:
    """The files of an adapter, all of whose weights are `fill`."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, **config})
    )
    weights = folder / "adapter_model.safetensors"
    safetensors(weights, fill=fill)
    written_s = next(
        _writes
    )  # a file system's clock may not move between two writes of a test
    os.utime(weights, (written_s, written_s))
    return folder


def request(
    path: Path | str, name: str = "support-bot", number: int = 1, **more: Any
) -> LoRARequest:
    return LoRARequest(name, number, str(path), **more)


def content(path: Path | str, adapters: Adapters | None = None, **named: Any) -> str:
    return (adapters or Adapters()).content_of(request(path, **named))


def test_equal_files_are_one_adapter_on_two_engines_whatever_their_names(
    tmp_path: Path,
) -> None:
    one = adapter(
        tmp_path / "one", base_model_name_or_path="/models/a", peft_version="0.15.0"
    )
    other = adapter(
        tmp_path / "other", base_model_name_or_path="/srv/b", peft_version="0.16.0"
    )
    (other / "optimizer.pt").write_bytes(b"what a training leaves behind")
    assert content(one) == content(other, name="another", number=7)


@pytest.mark.parametrize(
    "changed", [{"fill": 2}, {"lora_alpha": 32}, {"r": 16}, {"use_rslora": True}]
)
def test_two_versions_under_one_name_are_two_adapters(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert content(adapter(tmp_path / "v1")) != content(
        adapter(tmp_path / "v2", **changed)
    )


@pytest.mark.parametrize(
    "option",
    [
        {"lora_dtype": "torch.float16"},
        {"target_modules": ["o_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
    ],
)
def test_options_that_change_what_an_adapter_does_are_part_of_it(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {
        "lora_dtype": "torch.bfloat16",
        "target_modules": None,
        "enable_tower_connector_lora": False,
        "enable_moe_shared_loras": False,
        "enable_mixed_moe_lora_format": False,
        "max_loras": 1,
    }
    path = adapter(tmp_path / "adapter")
    found = []
    for options in (usual, {**usual, "max_loras": 4}, {**usual, **option}):
        config: Any = SimpleNamespace(
            lora_config=SimpleNamespace(**options),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
        )
        found.append(content(path, Adapters.from_vllm_config(config)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("missing", ["folder", "weights"])
def test_what_cannot_be_read_is_shared_with_no_engine(
    tmp_path: Path, missing: str
) -> None:
    path = tmp_path / "adapter"
    if missing == "weights":
        (adapter(path) / "adapter_model.safetensors").unlink()
    one, other = Adapters(), Adapters()
    assert content(path, one) == content(path, one)
    assert content(path, one) != content(path, other)
    assert content(adapter(path), one) == content(path, other), (
        "and it is shared from the moment it can be read"
    )


def test_an_adapter_that_was_removed_after_it_was_loaded_is_what_it_was(
    tmp_path: Path,
) -> None:
    path, adapters = adapter(tmp_path / "adapter"), Adapters()
    before = content(path, adapters)
    shutil.rmtree(path)
    assert content(path, adapters) == before


def test_files_that_change_under_a_loaded_adapter_are_not_trusted(
    tmp_path: Path,
) -> None:
    """The engine runs with the old ones as long as it keeps them, and reads the new ones when it loads it again."""
    path, adapters = adapter(tmp_path / "adapter"), Adapters()
    content(path, adapters)
    adapter(path, fill=2)
    assert content(path, adapters).startswith("unknown")
    adapters.reset()
    assert content(path, adapters).startswith("unknown"), (
        "a reset empties caches, and loads nothing"
    )


@pytest.mark.parametrize(
    "how", ["in place", "unloaded and loaded", "from another path"]
)
def test_a_new_version_under_the_same_name_is_trusted_when_the_old_ones_blocks_are_gone(
    tmp_path: Path, how: str
) -> None:
    """vLLM finds blocks in its prefix cache by the adapter's name."""
    path, adapters = adapter(tmp_path / "v1"), Adapters()
    first = {"load_inplace": True} if how == "in place" else {}
    content(path, adapters, **first)
    newer = adapter(tmp_path / ("v2" if how == "from another path" else "v1"), fill=2)
    again: dict[str, Any] = first or {"number": 2}
    assert content(newer, adapters, **again).startswith("unknown")
    adapters.reset()
    assert content(newer, adapters, **again) == content(newer)
    uncached = Adapters(has_prefix_cache=False)
    assert content(adapter(tmp_path / "v3"), uncached, **first) != content(
        newer, uncached, **again
    )


@pytest.mark.parametrize("first_in_place", [True, False])
def test_a_number_that_had_two_contents_is_trusted_in_place_only(
    tmp_path: Path, *, first_in_place: bool
) -> None:
    """Of the other requests, the engine has not said which of the contents they are computed with."""
    path, adapters = adapter(tmp_path / "v1"), Adapters(has_prefix_cache=False)
    first = content(path, adapters, load_inplace=first_in_place)
    assert content(path, adapters) == first
    newer = adapter(tmp_path / "v2", fill=2)
    if first_in_place:
        assert content(newer, adapters).startswith("unknown"), "it is not loaded"
    assert content(newer, adapters, load_inplace=True) == content(newer)
    for version in (path, newer):
        assert content(version, adapters).startswith("unknown")


def test_a_content_that_comes_back_is_not_trusted_before_the_other_ones_blocks_are_gone(
    tmp_path: Path,
) -> None:
    """Blocks of both are cached under one name: which of them vLLM hits is not known."""
    path, adapters = adapter(tmp_path / "adapter"), Adapters()
    first = content(path, adapters, load_inplace=True)
    for fill in (2, 3):
        adapter(path, fill=fill)
        assert content(path, adapters, load_inplace=True).startswith("unknown")
        assert adapters.num_replaced == 1
    adapter(path)
    assert content(path, adapters, load_inplace=True).startswith("unknown")
    adapters.reset()
    assert content(path, adapters, load_inplace=True) == first
    assert adapters.num_replaced == 1


def test_files_that_are_none_of_an_adapter_raise_nothing(tmp_path: Path) -> None:
    """It is asked within a step of the engine, for requests that have nothing to do with another engine, too."""
    path = adapter(tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.safetensors").mkdir()
    assert content(path).startswith("unknown")


def test_what_has_not_changed_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, adapters = adapter(tmp_path / "adapter"), Adapters()
    before = content(path, adapters)
    monkeypatch.setattr("kvferry.connector.engine.adapters.fingerprint", pytest.fail)
    assert content(path, adapters) == before
