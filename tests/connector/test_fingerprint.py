"""Fingerprints: equal for equal weights and different for others, without reading all of them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.engine.fingerprint import (
    fingerprint,
    local_model_dir,
    local_weights_dir,
)
from tests.draws import draws

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_scaling": {"factor": 2.0},
}
TENSOR_BYTES = 4096


def safetensors(
    file: Path, fill: int = 1, names: tuple[str, ...] = ("a", "b", "c"), **metadata: str
) -> None:
    """A file of tensors of `TENSOR_BYTES` bytes each, filled with one value."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for index, name in enumerate(names):
        span = [index * TENSOR_BYTES, (index + 1) * TENSOR_BYTES]
        entries[name] = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": span}
    header = json.dumps(entries).encode()
    file.write_bytes(
        len(header).to_bytes(8, "little")
        + header
        + bytes([fill]) * (TENSOR_BYTES * len(names))
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors(folder / "model-1.safetensors")
    safetensors(folder / "model-2.safetensors", fill=2)
    return folder


def test_the_same_files_have_the_same_fingerprint(model: Path) -> None:
    first = fingerprint(CONFIG, model)
    assert first == fingerprint(dict(reversed(CONFIG.items())), model)
    assert first.startswith("weights:")
    assert len(first) == len("weights:") + 32


def test_a_copy_under_another_name_has_the_same_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    os.utime(copy / "model-1.safetensors", (0, 0))
    named = [
        {**CONFIG, "_name_or_path": str(place), "transformers_version": str(place)}
        for place in (model, copy)
    ]
    assert fingerprint(named[0], model) == fingerprint(named[1], copy)
    nested = [{"model_type": "llava", "text_config": one} for one in named]
    assert fingerprint(nested[0], model) == fingerprint(nested[1], copy)
    assert fingerprint(nested[0], model) != fingerprint(
        {**nested[0], "text_config": {"hidden_size": 65}}, model
    )


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_other_weights_of_the_same_shape_have_another_fingerprint(
    model: Path, tensor: int
) -> None:
    before = fingerprint(CONFIG, model)
    file = model / "model-2.safetensors"
    raw = bytearray(file.read_bytes())
    start = len(raw) - (3 - tensor) * TENSOR_BYTES
    raw[start : start + TENSOR_BYTES] = bytes(range(256)) * (TENSOR_BYTES // 256)
    file.write_bytes(raw)
    assert fingerprint(CONFIG, model) != before


def test_another_header_config_file_or_seed_gives_another_fingerprint(
    model: Path,
) -> None:
    seen = {
        fingerprint(CONFIG, model),
        fingerprint(CONFIG, model, "dummy:1"),
        fingerprint({}, model),
    }
    seen.add(fingerprint({**CONFIG, "rope_scaling": {"factor": 4.0}}, model))
    safetensors(model / "model-1.safetensors", names=("a", "b", "d"))
    seen.add(fingerprint(CONFIG, model))
    safetensors(model / "model-1.safetensors", names=("a", "b", "d"), quant="awq")
    seen.add(fingerprint(CONFIG, model))
    (model / "model-1.safetensors").unlink()
    seen.add(fingerprint(CONFIG, model))
    (model / "model-2.safetensors").rename(model / "model.safetensors")
    seen.add(fingerprint(CONFIG, model))
    assert len(seen) == 8


@pytest.mark.parametrize("files", ["missing", "none", "no weights"])
def test_without_files_only_the_configuration_is_reported(
    files: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    where = {"missing": tmp_path / "absent", "none": None, "no weights": tmp_path}[
        files
    ]
    found = fingerprint(CONFIG, where)
    assert found.startswith("config:")
    assert found != fingerprint({**CONFIG, "hidden_size": 65}, where)
    assert found != fingerprint(CONFIG, where, "dummy:0")


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "gguf"])
def test_weights_without_a_readable_header_are_sampled_all_over(
    tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"model.{suffix}"
    seen = set()
    for at in (None, 0, 1000, 5000, 9999):
        raw = bytearray(10_000)
        if at is not None:
            raw[at] = 1
        file.write_bytes(raw)
        seen.add(fingerprint(CONFIG, tmp_path))
    assert len(seen) == 5
    assert all(found.startswith("weights:") for found in seen)


def test_one_gguf_file_is_not_its_neighbour(tmp_path: Path) -> None:
    """Quantisations of one model lie side by side in one directory, and either may be named by its path."""
    for name, fill in (("q4", 1), ("q8", 2)):
        (tmp_path / f"{name}.gguf").write_bytes(bytes([fill]) * 4096)
    found = [
        local_model_dir(str(tmp_path / f"{name}.gguf"), None, None)
        for name in ("q4", "q8")
    ]
    assert fingerprint(CONFIG, found[0]) != fingerprint(CONFIG, found[1])
    assert fingerprint(CONFIG, found[0]).startswith("weights:")


def corrupt(header: bytes, length: int | None = None) -> bytes:
    return (
        (len(header) if length is None else length).to_bytes(8, "little")
        + header
        + b"\1" * 64
    )


CORRUPT = {
    "shorter than a length": b"\1\2\3",
    "length beyond the file": corrupt(b"{}", 1 << 40),
    "not json": corrupt(b"\xff\xfe{"),
    "a list": corrupt(b"[1]"),
    "an entry that is a list": corrupt(b'{"a": [1]}'),
    "offsets that are not finite": corrupt(b'{"a": {"data_offsets": [NaN, Infinity]}}'),
    "negative offsets": corrupt(b'{"a": {"data_offsets": [-9000, -8000]}}'),
    "offsets beyond 64 bits": corrupt(
        b'{"a": {"data_offsets": [0, 1%s]}}' % (b"0" * 40)
    ),
    "as deep as the parser goes": corrupt(b'{"a":' * 50_000),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_safetensors_file_stops_nothing_and_changes_the_fingerprint(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(CORRUPT[kind])
    found = fingerprint(CONFIG, tmp_path)
    assert found.startswith("weights:")
    file.write_bytes(CORRUPT[kind] + b"\2")
    assert fingerprint(CONFIG, tmp_path) != found


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.binary(max_size=40)
    | _JSON.map(lambda value: json.dumps({"a": {"data_offsets": value}}).encode())
)
@settings(max_examples=draws(100))
def test_any_header_is_survived(
    tmp_path_factory: pytest.TempPathFactory, header: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-header"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(corrupt(header))
    assert fingerprint(CONFIG, folder).startswith("weights:")


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_file_of_many_gigabytes_is_quick(tmp_path: Path, name: str) -> None:
    size = 64 << 30
    with (tmp_path / name).open("wb") as file:
        if name.endswith("safetensors"):
            span = size // 10_000
            entries = {
                f"t{n}": {"data_offsets": [n * span, (n + 1) * span]}
                for n in range(10_000)
            }
            header = json.dumps(entries).encode()
            file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(size)
    started_s = time.process_time()
    assert fingerprint(CONFIG, tmp_path).startswith("weights:")
    assert time.process_time() - started_s < 2


def test_a_models_files_are_found_where_it_lies_and_a_bad_name_is_no_error(
    tmp_path: Path,
) -> None:
    assert local_model_dir(str(tmp_path), None, None) == tmp_path
    for name in ("org/absent", "a/b/c/d", "\0", "repo:Q4_K_M", ""):
        assert local_model_dir(name, None, str(tmp_path)) is None


def test_a_snapshot_in_the_hubs_cache_is_found_without_the_network(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "models--org--toy"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    assert local_model_dir("org/toy", None, str(tmp_path)) == snapshot
    assert local_model_dir("org/toy", "c" * 40, str(tmp_path)) == snapshot
    assert local_model_dir("org/toy", "other", str(tmp_path)) is None


@pytest.mark.parametrize("revision", [None, "c" * 40])
def test_weights_are_found_in_the_download_dir_although_vllm_downloads_the_configuration_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    """Otherwise all fine-tunes of a model would have one fingerprint."""
    downloads, cache = tmp_path / "downloads", tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for place, file in ((downloads, "model.safetensors"), (cache, "config.json")):
        snapshot = place / "models--org--toy" / "snapshots" / ("c" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / file).write_bytes(b"{}")
        (place / "models--org--toy" / "refs").mkdir()
        (place / "models--org--toy" / "refs" / "main").write_text("c" * 40)
    found = local_weights_dir("org/toy", revision, str(downloads))
    assert found == downloads / "models--org--toy" / "snapshots" / ("c" * 40)
    assert local_weights_dir("org/toy", "other", str(downloads)) is None
    assert local_weights_dir(str(tmp_path), revision, str(downloads)) == tmp_path
    for name in ("org/absent", "a/b/c/d", "\0", ""):
        assert local_weights_dir(name, revision, str(downloads)) is None
