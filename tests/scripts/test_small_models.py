"""Small models are made once, are always the same, and are never seen half made."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.accuracy.model import whole
from tests.vllm.small_models import small_model

pytest.importorskip("transformers")

NAME = "small-draft"


def test_a_model_is_the_same_whenever_it_is_made_and_is_made_once(tmp_path: Path) -> None:
    import torch

    first = small_model(NAME, tmp_path / "a")
    torch.rand(7)
    before = torch.get_rng_state()
    second = small_model(NAME, tmp_path / "b")
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is unchanged"
    weights = first / "model.safetensors"
    assert weights.read_bytes() == (second / "model.safetensors").read_bytes()
    made = weights.stat()
    assert small_model(NAME, tmp_path / "a") == first
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_who_is_slower_uses_what_the_other_has_made(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole(target) as slow:
        with whole(target) as quick:
            (quick / "config.json").write_text("quick")
        (slow / "config.json").write_text("slow")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "config.json").read_text() == "quick"


def test_a_model_that_could_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole(tmp_path / "model"):
            raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        fail()
    assert list(tmp_path.iterdir()) == []
