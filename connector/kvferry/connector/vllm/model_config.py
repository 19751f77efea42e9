"""A model's configuration, as vLLM reads it from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def read_model_config(model: ModelConfig, directory: Path) -> dict[str, Any]:
    """The configuration in a folder, with this engine's overrides applied.

    It raises whatever a model's own code raises.
    """
    # The calls of `ModelConfig.__post_init__` (config/model.py:668-681). What they returned, `model.hf_config`, cannot
    # be compared: models change it while they are loaded, in the workers only.
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides or {}
    override_function = None
    flat: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    if callable(overrides):
        override_function = overrides
    else:
        for key, value in overrides.items():
            if isinstance(value, dict):
                nested[key] = value
            else:
                flat[key] = value
    config = get_config(
        directory,
        model.trust_remote_code,
        None,
        model.code_revision,
        model.config_format,
        hf_overrides_kw=flat,
        hf_overrides_fn=override_function,
    )
    if nested:
        model._apply_dict_overrides(config, nested)  # vLLM's own rule, not a copy of it
    plain: dict[str, Any] = config.to_dict()
    return plain


def config_revision(model: ModelConfig) -> str | None:
    """The revision of the model's configuration, which vLLM resolves apart from that of its weights."""
    revision: str | None = getattr(model, "_hf_config_revision", None) or model.revision
    return revision


def model_class_name(model: ModelConfig) -> str | None:
    """The class that vLLM runs for the model, where it is resolved: a configuration may list several."""
    return getattr(model, "_architecture", None)
