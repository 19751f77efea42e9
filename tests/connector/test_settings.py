"""What engines run with is compared: settings that change keys and values, and none of those that do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import LoRAConfig, ModelConfig, MultiModalConfig, VllmConfig

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import facts_of
from kvferry.connector.engine.settings import settings_of
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.handshake import MAX_SETTINGS, ModelFacts
from tests.connector.test_facts import engine_config
from tests.connector.test_fingerprint import safetensors
from tests.plan.samples import engine

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}
PHI: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 256,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
    "pad_token_id": 0,
}
LLAMA_4: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "max_position_embeddings": 1 << 20,
    "pad_token_id": 0,
}
BERT_LIKE_KEYS = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}


class Models:
    """Makes the configuration of an engine for a model whose files are written for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def write(self, config: dict[str, Any], *, fill: int = 1) -> Path:
        """A folder with these files."""
        self._count += 1
        folder = self._folder / f"model-{self._count}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        safetensors(folder / "model.safetensors", fill=fill)
        return folder

    def engine(self, config: dict[str, Any] | Path = LLAMA, **options: Any) -> Any:
        """An engine of a model, with vLLM's own options."""
        folder = config if isinstance(config, Path) else self.write(config)
        options = {"max_model_len": 128, "dtype": "float32", **options}
        model = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            **options,
        )
        found = engine_config()
        found.model_config = model
        return found


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def facts(config: Any, **own: Any) -> ModelFacts:
    return facts_of(config, FerryConfig(**own))


def differences(
    producer: ModelFacts, consumer: ModelFacts
) -> dict[str, tuple[str, str]]:
    """By field the values for which two engines are refused; empty if they are paired."""
    ours, theirs = (
        msgspec.structs.replace(engine(), facts=each) for each in (consumer, producer)
    )
    try:
        plan_transfer(ours, 0, theirs)
    except PlanRefused as refused:
        return {
            reason.field: (reason.producer, reason.consumer)
            for reason in refused.reasons
        }
    return {}


def between(producer: Any, consumer: Any) -> dict[str, tuple[str, str]]:
    return differences(facts(producer), facts(consumer))


# What must be equal.


def test_longrope_is_refused_where_the_lengths_choose_other_factors(
    models: Models,
) -> None:
    short, shorter, long = (
        models.engine(PHI, max_model_len=length) for length in (256, 64, 512)
    )
    assert between(short, shorter) == {}
    assert between(short, long) == {
        "model.longrope.config.rope_parameters": ('"short"', '"long"')
    }


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 4.0}],
)
def test_other_rotary_embeddings_do_not_depend_on_the_length(
    models: Models, rope: dict[str, Any]
) -> None:
    more = {
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = {**LLAMA, "rope_scaling": rope | more, "max_position_embeddings": 1024}
    assert (
        between(models.engine(config), models.engine(config, max_model_len=512)) == {}
    )
    other = {**config, "rope_scaling": rope | more | {"factor": 8.0}}
    assert list(between(models.engine(config), models.engine(other))) == [
        "model.config.rope_parameters.factor"
    ]


def test_positions_are_compared_where_the_rotary_embedding_scales_with_them(
    models: Models,
) -> None:
    plain = {**LLAMA, "max_position_embeddings": 2048}
    assert between(models.engine(), models.engine(plain)) == {}
    ropes = [
        {**one, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        for one in (LLAMA, plain)
    ]
    assert list(between(*map(models.engine, ropes))) == [
        "model.config.max_position_embeddings"
    ]


def test_a_configuration_from_elsewhere_is_compared_not_the_one_beside_the_weights(
    models: Models,
) -> None:
    weights = models.write(LLAMA)
    elsewhere = models.write({**LLAMA, "rope_theta": 500.0})
    equal = models.write({**LLAMA, "rope_theta": 10_000})
    usual = models.engine(weights)
    assert between(usual, models.engine(weights, hf_config_path=str(elsewhere))) == {
        "model.config.rope_parameters.rope_theta": ("10000", "500")
    }
    assert between(usual, models.engine(weights, hf_config_path=str(equal))) == {}


@pytest.mark.parametrize(
    ("overrides", "config", "field"),
    [
        ({"rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}, "hidden_act"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_theta": 5.0},
            "rope_theta",
        ),
    ],
)
def test_overrides_are_part_of_what_runs_and_no_more_than_that(
    models: Models, overrides: dict[str, Any], config: dict[str, Any], field: str
) -> None:
    weights = models.write(LLAMA)
    overridden = models.engine(weights, hf_overrides=overrides)
    found = between(models.engine(weights), overridden)
    assert [name.rpartition(".")[2] for name in found] == [field]
    assert between(overridden, models.engine({**LLAMA, **config})) == {}, (
        "the same, but written in the file"
    )


def test_overrides_by_a_function_are_applied(models: Models) -> None:
    def other(config: Any) -> Any:
        config.rms_norm_eps = 0.5
        return config

    weights = models.write(LLAMA)
    found = between(models.engine(weights), models.engine(weights, hf_overrides=other))
    assert found == {"model.config.rms_norm_eps": ("1e-06", "0.5")}


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ({"max_model_len": 4096}, {"max_model_len": 65536}, True),
        ({"max_model_len": 4096}, {"max_model_len": 8192}, False),
        ({}, {"override_generation_config": {"attn_temperature_tuning": True}}, True),
        (
            {"max_model_len": 65536},
            {
                "max_model_len": 4096,
                "override_generation_config": {"attn_temperature_tuning": True},
            },
            False,
        ),
        ({}, {"override_generation_config": {"temperature": 0.5}}, False),
    ],
)
def test_llama_4s_attention_temperature_is_compared_as_vllm_decides_it(
    models: Models, first: dict[str, Any], second: dict[str, Any], differ: bool
) -> None:
    found = between(models.engine(LLAMA_4, **first), models.engine(LLAMA_4, **second))
    assert list(found) == (["model.attention_temperature"] if differ else [])


def test_what_is_decided_by_length_is_decided_before_the_cache_is_measured(
    models: Models,
) -> None:
    """With `--max-model-len auto` the model is built for its longest sequence, and vLLM shortens it afterwards."""
    fitted = models.engine(LLAMA_4, max_model_len=-1)
    fitted.model_config.max_model_len = 128
    assert between(models.engine(LLAMA_4, max_model_len=65536), fitted) == {}
    assert list(between(models.engine(LLAMA_4), fitted)) == [
        "model.attention_temperature"
    ]


def test_a_generation_config_decides_llama_4s_attention_temperature(
    models: Models,
) -> None:
    plain, tuned = (models.write(LLAMA_4) for _ in range(2))
    (tuned / "generation_config.json").write_text('{"attn_temperature_tuning": true}')
    assert list(between(models.engine(plain), models.engine(tuned))) == [
        "model.attention_temperature"
    ]


def test_quantisation_at_run_time_is_compared_with_its_options(models: Models) -> None:
    one, other = models.engine(), models.engine()
    one.model_config.quantization = other.model_config.quantization = "fp8"
    one.model_config.quantization_config = {
        "linear": {"weight": "fp8_per_tensor"},
        "ignore": ["lm_head"],
    }
    other.model_config.quantization_config = {
        "linear": {"weight": "fp8_per_channel"},
        "ignore": ["lm_head"],
    }
    assert list(between(one, other)) == ["model.online_quantization.linear.weight"]
    other.model_config.quantization = None
    assert "model.quantization" in between(one, other)


def test_the_class_that_computes_is_compared_as_vllm_resolved_it(
    models: Models,
) -> None:
    one, other = models.engine(), models.engine()
    other.model_config._architecture = "TransformersForCausalLM"
    assert between(one, other) == {
        "model.model_class": ('"LlamaForCausalLM"', '"TransformersForCausalLM"')
    }
    other.model_config._architecture = "LlamaForCausalLM"
    other.model_config.model_class_overrides = {"LlamaForCausalLM": "my_models:Llama"}
    assert list(between(one, other)) == ["model.model_class.overrides.LlamaForCausalLM"]


def test_heads_are_compared_even_where_an_operator_has_named_the_weights(
    models: Models,
) -> None:
    named = {"model_fingerprint": "llama-v7"}
    one, more = (
        facts(models.engine({**LLAMA, "num_key_value_heads": heads}), **named)
        for heads in (1, 2)
    )
    assert differences(more, one) == {"model.config.num_key_value_heads": ("2", "1")}


MEDIA: dict[str, Any] = {
    "mm_processor_kwargs": None,
    "media_io_kwargs": {},
    "video_pruning_rate": None,
    "video_pruning_method": "evs",
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 1000}}, "media.processor.max_pixels"),
        (
            {"media_io_kwargs": {"video": {"num_frames": 8}}},
            "media.io.video.num_frames",
        ),
        ({"video_pruning_rate": 0.5}, "media.video_pruning"),
        ({"mm_encoder_attn_dtype": "fp8"}, "media.encoder_attention"),
        ({"mm_processor_kwargs": {"device": "cuda"}}, None),
        ({"video_pruning_method": "vidcom2"}, None),
    ],
)
def test_what_a_processor_makes_of_media_is_compared(
    models: Models, changed: dict[str, Any], field: str | None
) -> None:
    engines = [models.engine(), models.engine()]
    for config, more in zip(engines, ({}, changed), strict=True):
        config.model_config.multimodal_config = SimpleNamespace(**{**MEDIA, **more})
    assert list(between(*engines)) == ([f"model.{field}"] if field else [])


def test_the_processors_files_are_compared_of_models_with_media_only(
    models: Models,
) -> None:
    folders = [models.write(LLAMA), models.write(LLAMA)]
    for folder, pixels in zip(folders, (100, 200), strict=True):
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"max_pixels": pixels})
        )
    engines = [models.engine(folder) for folder in folders]
    assert between(*engines) == {}
    for config in engines:
        config.model_config.multimodal_config = SimpleNamespace(**MEDIA)
    assert between(*engines) == {
        "model.processor.preprocessor_config.max_pixels": ("100", "200")
    }


@pytest.mark.parametrize("runs", [True, False])
def test_code_beside_the_model_is_compared_where_it_computes(
    models: Models, runs: bool
) -> None:
    """vLLM's own classes do not run it; then it is only a configuration's class, which is resolved."""
    folders = [models.write(LLAMA), models.write(LLAMA)]
    engines = [models.engine(folder) for folder in folders]
    for number, (config, folder) in enumerate(zip(engines, folders, strict=True)):
        (folder / "modeling_own.py").write_text(f"SCALE = {number}")
        config.model_config.trust_remote_code = True
        config.model_config.hf_config.auto_map = {"AutoModel": "modeling_own.Model"}
        config.model_config.using_transformers_backend = lambda: runs
    assert list(between(*engines)) == (["model.code"] if runs else [])


# Drafts.


def drafting(config: Any, method: str, draft: Any = None) -> Any:
    model = None if draft is None else draft.model_config
    config.speculative_config = SimpleNamespace(method=method, draft_model_config=model)
    return config


@pytest.mark.parametrize(
    "method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"]
)
def test_drafts_without_a_cache_do_not_matter(models: Models, method: str) -> None:
    plain, drafts = models.engine(), drafting(models.engine(), method)
    assert between(plain, drafts) == between(drafts, plain) == {}
    assert between(drafting(models.engine(), "ngram"), drafts) == {}


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle", "eagle3", "mtp", "dflash", "custom_class"]
)
def test_drafts_with_a_cache_must_be_made_alike(models: Models, method: str) -> None:
    one, same = (drafting(models.engine(), method, models.engine()) for _ in range(2))
    assert between(one, same) == {}
    assert "model.speculative" in between(models.engine(), one)


def test_a_draft_model_is_compared_by_its_weights_and_configuration(
    models: Models,
) -> None:
    def engine_with(draft: Any) -> Any:
        return drafting(models.engine(), "draft_model", draft)

    one = engine_with(models.engine(models.write(LLAMA, fill=2)))
    assert list(
        between(one, engine_with(models.engine(models.write(LLAMA, fill=3))))
    ) == ["model.draft.weights"]
    other_config = models.write({**LLAMA, "rope_theta": 5.0}, fill=2)
    assert list(between(one, engine_with(models.engine(other_config)))) == [
        "model.draft.config.rope_parameters.rope_theta"
    ]
    half = models.engine(models.write(LLAMA, fill=2), dtype="bfloat16")
    assert list(between(one, engine_with(half))) == ["model.draft.dtype"]


# What need not be equal.


@pytest.mark.parametrize(
    "changed",
    [
        {"_name_or_path": "/models/elsewhere", "transformers_version": "4.40.0"},
        {"torch_dtype": "bfloat16"},
        {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None},
        {"use_cache": False, "output_attentions": True, **BERT_LIKE_KEYS},
        {"initializer_range": 0.5, "attention_dropout": 0.1, "pretraining_tp": 2},
        {"tie_word_embeddings": True, "rms_norm_eps": 0.000001, "rope_theta": 10000},
        {"max_position_embeddings": 4096},
    ],
)
def test_settings_that_change_no_value_refuse_nothing(
    models: Models, changed: dict[str, Any]
) -> None:
    assert between(models.engine(), models.engine({**LLAMA, **changed})) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 1024},
        {"seed": 7},
        {"enforce_eager": True},
        {"served_model_name": "another"},
        {"generation_config": "vllm"},
        {"override_generation_config": {"temperature": 0.1}},
        {"trust_remote_code": True},
        {"disable_sliding_window": True},
        {"enable_prompt_embeds": True},
        {"max_logprobs": 5},
    ],
)
def test_options_that_change_no_value_refuse_nothing(
    models: Models, options: dict[str, Any]
) -> None:
    assert between(models.engine(), models.engine(**options)) == {}


def test_a_configuration_that_changes_while_a_model_is_loaded_is_as_it_was(
    models: Models,
) -> None:
    """vLLM completes Falcon-H1's in the workers, so that an engine's scheduler and its workers would differ."""
    fresh, loaded = models.engine(), models.engine()
    loaded.model_config.hf_config.partial_rotary_factor = 0.5
    loaded.model_config.hf_config.max_model_len = 128
    assert between(fresh, loaded) == {}


# Whatever there is, an engine starts.


def test_without_files_the_configuration_in_memory_is_compared(
    models: Models, tmp_path: Path
) -> None:
    one, other = models.engine(), models.engine({**LLAMA, "rms_norm_eps": 0.5})
    for config in (one, other):
        config.model_config.model = str(tmp_path / "on-a-store")
        config.model_config.hf_config_path = None
    assert list(between(one, other)) == ["model.config.rms_norm_eps"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"model_type": "nothing that is known"}', '{"model_type": 5}']
)
def test_a_file_that_cannot_be_read_stops_nothing(
    models: Models, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # vLLM tries again after seconds
    folder = models.write(LLAMA)
    config = models.engine(folder)
    (folder / "config.json").write_text(text)
    assert between(models.engine(), config) == {}


ODD_VALUES: tuple[tuple[Any, bool], ...] = (
    (object(), True),
    ({"deep": {"deeper": float("inf")}}, True),
    (["x" * 5000] * 100, True),
    ("\x00\x1b[31m\u202e", True),
    ({"key\n\x00": 1}, True),
    ({}, False),
    (None, False),
)
"""Values in memory, and whether they say something."""


@pytest.mark.parametrize(("value", "says"), ODD_VALUES)
def test_any_value_becomes_a_short_line_that_the_wire_takes(
    models: Models, value: Any, says: bool
) -> None:
    config = models.engine()
    before = settings_of(config)
    config.model_config.quantization_config = value
    after = settings_of(config)
    assert len(after) == len(before) + says
    assert max(len(one.value) for one in after) < 200
    reported = facts(config)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(reported), type=ModelFacts)
        == reported
    )
    assert facts(config) == reported


def test_too_many_settings_are_one_in_the_end_and_still_compared(
    models: Models,
) -> None:
    found = []
    for last in (1, 1, 2):
        config = models.engine()
        many = {f"layer{n:05}": n for n in range(3 * MAX_SETTINGS)}
        config.model_config.quantization_config = {**many, "zzz": last}
        found.append(facts(config))
    assert len(found[0].settings) == MAX_SETTINGS
    assert differences(found[0], found[1]) == {}
    assert list(differences(found[0], found[2])) == ["model.others"]


def test_a_refusal_stays_short_however_much_differs(models: Models) -> None:
    one, other = models.engine(), models.engine()
    other.model_config.quantization_config = {
        f"layer{n}": "x" * 1000 for n in range(500)
    }
    found = between(one, other)
    assert len(found) == 9
    assert found["settings"] == ("…", "…")


# The list in docs/compatibility.md is whole: a field that a new vLLM brings must be decided on.


COMPARED = {
    # the weights
    *("model", "model_weights", "revision", "seed"),
    # facts
    *("dtype", "quantization"),
    # settings
    *(
        "quantization_config",
        "hf_config",
        "hf_text_config",
        "hf_config_path",
        "hf_overrides",
        "config_format",
    ),
    *("model_impl", "model_class_overrides", "trust_remote_code", "code_revision"),
    *(
        "generation_config",
        "override_generation_config",
        "max_model_len",
        "multimodal_config",
    ),
}
NOT_COMPARED = {
    # ids, texts and logits
    *(
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "served_model_name",
    ),
    *(
        "max_logprobs",
        "logprobs_mode",
        "return_sampling_mask",
        "use_fp64_gumbel",
        "enable_trace_replay",
    ),
    *(
        "logits_processors",
        "io_processor_plugin",
        "renderer_num_workers",
        "pooler_config",
    ),
    # where things are, and who may read them
    *("allowed_local_media_path", "allowed_media_domains", "hf_token"),
    # how a step is launched
    *(
        "enforce_eager",
        "disable_cascade_attn",
        "runner",
        "convert",
        "allow_deprecated_quantization",
    ),
    # windows: the groups tell
    "disable_sliding_window",
    # prompts of embeddings are not transferred
    "enable_prompt_embeds",
    # memory
    *(
        "enable_sleep_mode",
        "sleep_preserve_parameter_names",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
    ),
    *("enable_nccl_comm_suspend", "enable_cumem_allocator"),
    # derived
    *(
        "is_submodel_config",
        "word_embeddings_untied_by_checkpoint",
        "spec_target_max_model_len",
    ),
}


OF_MEDIA = {
    # compared
    *(
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "video_pruning_method",
    ),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    # limits, and which prompts are taken at all
    *(
        "language_model_only",
        "limit_per_prompt",
        "enable_mm_embeds",
        "mm_encoder_only",
        "allow_missing_mm_embeddings",
    ),
    # identifiers: those that differ share nothing
    "mm_hasher_algorithm",
    # where and how it is computed
    *(
        "mm_device_do_normalize",
        "mm_encoder_tp_mode",
        "mm_encoder_attn_backend",
        "skip_mm_profiling",
    ),
    *(
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
    ),
    *(
        "mm_ipc_gpu_memory_gb",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
    ),
    # the prompt's text, whose tokens are compared
    "interleave_mm_strings",
}
OF_ADAPTERS = {
    # part of an adapter's content
    *("lora_dtype", "target_modules", "enable_tower_connector_lora"),
    *("enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
    # limits, kernels, and the choice of an adapter, which a request names
    *(
        "max_lora_rank",
        "max_loras",
        "max_cpu_loras",
        "fully_sharded_loras",
        "specialize_active_lora",
    ),
    *("default_mm_loras", "max_lora_cls_labels"),
}
OF_THE_ENGINE = {
    # compared: facts, settings, tensors, groups, contents of adapters
    *(
        "model_config",
        "cache_config",
        "load_config",
        "lora_config",
        "speculative_config",
        "quant_config",
    ),
    # sizes and rounding
    *(
        "parallel_config",
        "scheduler_config",
        "device_config",
        "offload_config",
        "attention_config",
        "mamba_config",
    ),
    *(
        "kernel_config",
        "compilation_config",
        "optimization_level",
        "performance_mode",
        "engram_config",
    ),
    # after the logits, or beside the model
    *(
        "structured_outputs_config",
        "reasoning_config",
        "watermark_config",
        "diffusion_config",
        "aux_output_config",
    ),
    *(
        "observability_config",
        "logging_config",
        "profiler_config",
        "watchdog_config",
        "kv_transfer_config",
        "kv_events_config",
    ),
    *(
        "ec_transfer_config",
        "ec_manager_config",
        "weight_transfer_config",
        "instance_id",
        "shutdown_timeout",
    ),
    # of platform plugins, whose meaning is not known: docs/compatibility.md says so
    "additional_config",
}


@pytest.mark.parametrize(
    ("part", "decided"),
    [
        (ModelConfig, COMPARED | NOT_COMPARED),
        (MultiModalConfig, OF_MEDIA),
        (LoRAConfig, OF_ADAPTERS),
        (VllmConfig, OF_THE_ENGINE),
    ],
    ids=["model", "media", "adapters", "engine"],
)
def test_every_field_of_vllms_configuration_is_decided_on(
    part: Any, decided: set[str]
) -> None:
    fields = {field.name for field in dataclasses.fields(part)}
    assert fields - decided == set(), "compare them, or say why that is not needed"
