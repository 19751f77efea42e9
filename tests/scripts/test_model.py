"""Properties of a model that are known before an engine serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError

from scripts.accuracy.model import NoModel, prepare, token_size

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def test_a_token_of_smollm2_takes_its_keys_and_values_in_all_layers() -> None:
    assert token_size(SMOLLM2, 1, "float32") == (
        46080,
        "30 layers × 3 KV heads × 2 × 64 × 4 B",
    )
    assert token_size(SMOLLM2, 1, "bfloat16") == (
        23040,
        "30 layers × 3 KV heads × 2 × 64 × 2 B",
    )


class Hub:
    """A hub with one model, of these files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
        self.ignored: list[str] = []
        self.downloads: list[str] = []
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.HfApi.list_repo_files", lambda _, name: list(files)
        )
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._download)

    def _download(self, name: str, ignore_patterns: list[str]) -> None:
        if " " in name:
            raise HFValidationError(name)
        self.downloads.append(name)
        self.ignored = ignore_patterns


@pytest.mark.parametrize(
    ("end", "other"), [(".safetensors", ".bin"), (".bin", ".safetensors")]
)
def test_a_model_is_downloaded_before_engines_start_once_in_one_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, other: str
) -> None:
    hub = Hub(monkeypatch, "config.json", f"model{end}", "model.pth")
    said: list[str] = []
    assert prepare("some/model", tmp_path, said.append) == "some/model"
    assert hub.downloads == ["some/model"]
    assert f"*{end}" not in hub.ignored
    assert {f"*{other}", "*.pth"} <= set(hub.ignored)
    assert "download some/model" in said[0]


def test_a_model_that_cannot_be_downloaded_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Hub(monkeypatch)
    with pytest.raises(NoModel, match="MODEL_NAMES may name a folder"):
        prepare("not a name of a model", tmp_path, print)
