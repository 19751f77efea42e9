"""Models as users have them: config.json of known families, hostile ones, and every one that transformers knows."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.arguments import InvalidArgument, InvalidModel
from kvferry.cli.plan.model_config import MAX_CONFIG_BYTES, read_model_config
from kvferry.cli.plan.short_form import form_of, with_model
from tests.cli.command import refused, run
from tests.draws import draws

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "head_dim": 256,
    "sliding_window": 1024,
}
WINDOWS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
PLAIN = "layers=32,heads=8,dim=128,dtype=bfloat16"
# What differs from LLAMA, and the short form.
MODELS: list[tuple[dict[str, Any], str]] = [
    ({}, PLAIN),
    ({"num_key_value_heads": None}, PLAIN.replace("heads=8", "heads=32")),
    ({"head_dim": 64, "dtype": "float32"}, PLAIN.replace("128", "64")),
    ({"torch_dtype": "float16"}, PLAIN.replace("bfloat16", "float16")),
    (
        {
            **dict.fromkeys(LLAMA),
            "model_type": "gpt2",
            "n_layer": 12,
            "n_head": 12,
            "n_embd": 768,
            "dtype": "float16",
        },
        "layers=12,heads=12,dim=64,dtype=float16",
    ),
    (
        {"model_type": "falcon", "num_key_value_heads": None, "multi_query": True},
        PLAIN.replace("heads=8", "heads=1"),
    ),
    ({"model_type": "deepseek_v3", **LATENT}, "layers=32,mla=576,dtype=bfloat16"),
    ({**dict.fromkeys(LLAMA), "text_config": {**LLAMA, "head_dim": 128}}, PLAIN),
    ({"model_type": "mistral", "sliding_window": 4096}, f"{PLAIN},window=4096"),
    ({"model_type": "mistral", "sliding_window": None}, PLAIN),
    ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": False}, PLAIN),
    (GEMMA, "layers=12,heads=8,dim=256,dtype=bfloat16,window=1024@0-4+6-10"),
    (
        {**WINDOWS, "sliding_window": 9},
        PLAIN.replace("32", "6") + ",window=9@0-4/2",
    ),
    (
        {**GEMMA, "num_kv_shared_layers": 6},
        "layers=6,heads=8,dim=256,dtype=bfloat16,window=1024@0-4",
    ),
]


def read(config: object, **given: str) -> str:
    pairs = read_model_config(json.dumps(config).encode(), given)
    form_of(with_model(given, pairs))
    return ",".join(f"{key}={value}" for key, value in pairs.items())


@pytest.mark.parametrize(("changes", "form"), MODELS, ids=range(len(MODELS)))
def test_a_models_config_is_read_as_its_short_form(
    changes: dict[str, Any], form: str
) -> None:
    assert read({**LLAMA, **changes}) == form


# What differs from LLAMA, the error, and what to do.
REFUSED = """
{"num_hidden_layers": null}                      | num_hidden_layers is missing; expected a whole | layers=32
{"num_hidden_layers": "32"}                      | num_hidden_layers is '32'                      | layers=32
{"num_hidden_layers": true}                      | num_hidden_layers is True                      | layers=32
{"num_hidden_layers": 1000000000}                | num_hidden_layers is 1000000000                | layers=32
{"model_type": "gemma2", "num_key_value_heads": null} | num_key_value_heads is missing            | heads=8
{"model_type": "qwen3"}                          | head_dim is missing                            | dim=128
{"num_attention_heads": 33}                      | hidden_size is 4096; expected a multiple of 33 | dim=128
{"torch_dtype": null}                            | dtype is missing                               | dtype=bfloat16
{"torch_dtype": "float8_e4m3fn"}                 | dtype is 'float8_e4m3fn'                       | dtype=bfloat16
{"quantization_config": {"kv_cache_scheme": {"a": 8}}} | quantization_config is                   | dtype=
{"sliding_window": 9}                            | layer_types is missing                         | window=4096@0-30/2
{"model_type": "mistral"}                        | sliding_window is missing                      | window=4096
{"sliding_window": 9, "layer_types": ["full_attention"]} | layer_types is 1 names                 | 32
{"layer_types": ["linear_attention"]}            | layer_types is 'linear_attention'             | state_layers, ssm
{"mamba_d_state": 128}                           | mamba_d_state is 128                          | state_layers, ssm
{"attention_chunk_size": 8192}                   | attention_chunk_size is 8192                   | description_file
{"index_topk": 2048}                             | index_topk is 2048                             | description_file
{"v_head_dim": 64, "head_dim": 128}              | v_head_dim is 64                               | description_file
{"kv_lora_rank": 512}                            | model_type is 'llama'                          | description_file
{"is_encoder_decoder": true}                     | is_encoder_decoder is True                     | description_file
{"layer_types": 5}                               | layer_types is 5                               | description_file
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_config_json_does_not_say_is_refused_with_what_to_do(line: str) -> None:
    changes, said, do = line.split(" | ")
    with pytest.raises(InvalidModel) as wrong:
        read({**LLAMA, **json.loads(changes)})
    assert str(wrong.value).startswith(f"config.json: {said.strip()}")
    assert do in str(wrong.value)
    assert len(str(wrong.value)) < 400


def test_keys_that_are_written_behind_a_model_need_not_be_in_config_json() -> None:
    unusable = {**LLAMA, "torch_dtype": None, "num_key_value_heads": "?"}
    assert read(unusable, dtype="float16", heads="4") == "layers=32,dim=128"
    assert read({**LLAMA, "sliding_window": 9}, window="9@0-30/2") == PLAIN
    hybrid = {**LLAMA, "mamba_d_state": 128}
    assert read(hybrid, state_layers="0", ssm="4x8") == PLAIN
    nothing = {"model_type": "x"}
    assert read(nothing, layers="2", mla="576", dtype="float16") == "layers=2"


def test_a_file_that_is_no_config_is_refused() -> None:
    for text in (b"", b"[]", b"\xff", b"[" * 100_000, b"x" * (MAX_CONFIG_BYTES + 1)):
        with pytest.raises(InvalidModel, match=r"^config\.json: file is"):
            read_model_config(text, {})


PLAIN_VALUES = (None, True, 0, 7, -1, 0.5, 10**30, "full_attention", "bfloat16")
VALUES = st.recursive(
    st.sampled_from(PLAIN_VALUES) | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS_OF_CONFIGS = sorted(
    {key for config, _ in MODELS for key in (*LLAMA, *config)}
    | {"multi_query", "hybrid", "index_topk"}
)


@given(
    st.sampled_from([{**LLAMA, **config} for config, _ in MODELS]),
    st.dictionaries(st.sampled_from(KEYS_OF_CONFIGS), VALUES),
)
@settings(max_examples=draws(300))
def test_no_config_raises_any_other_error(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        text = json.dumps({**config, **changes}, allow_nan=False).encode()
    except ValueError:  # no JSON
        return
    try:
        form = form_of(read_model_config(text, {}))
    except (InvalidModel, InvalidArgument):
        return
    assert form.layers >= 1
    assert form.mla or (form.heads and form.dim)


def test_a_path_a_folder_and_a_name_of_the_hub_cache_are_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    path = folder / "snapshots" / commit / "config.json"
    path.write_text(json.dumps(LLAMA))
    wanted = run("plan", f"{PLAIN},tp=4", f"{PLAIN},tp=2,block=64").out
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for model in (str(path), str(path.parent), "meta-llama/Llama-3.1-8B"):
        ran = run("plan", f"{model},tp=4", "tp=2,block=64")
        assert (ran.code, ran.err) == (0, "")
        lines = ran.out.splitlines()
        # Below each engine the short form that it was read as.
        assert lines.pop(1) == f"         {PLAIN},tp=4"
        assert lines.pop(2) == f"         {PLAIN},tp=2,block=64"
        assert lines == wanted.splitlines()
    assert run("plan", "tp=4", f"{path},tp=2,block=64").out == ran.out
    assert run("plan", str(path), "tp=1").code == 0
    (folder / "refs" / "main").write_text("..")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    name = "meta-llama/Llama-3.1-8B,tp=4"
    assert "nothing is downloaded" in refused("plan", name, "tp=2")


def test_the_second_side_has_the_model_of_the_first_and_what_it_says_itself() -> None:
    windows = "layers=8,heads=8,dim=64,window=64@0-6/2,dtype=float16"
    states = "layers=2,state_layers=*,ssm=4x8,conv=x8,conv_width=2,state_dtype=float32"
    for form in (windows, states, "layers=2,mla=64,names=layers.{}"):
        short = run("plan", form, "tp=2", "--json")
        assert short.code == 0
        assert short.out == run("plan", form, f"{form},tp=2", "--json").out
    ran = run("plan", windows, "dtype=float8_e4m3,window=0", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["workable"] is False
    assert "CONSUMER: mla is" in refused("plan", windows, "mla=x")


SERVED_ELSEWHERE = re.compile(
    "t5|moshi|mimi|kyutai|dia_|qwen3_omni_moe_talker|openai_privacy_filter|zaya"
)
"""Speech, encoders and classifiers, and a hybrid that only its own key betrays."""
DROPPED = ("", "head_dim", "num_key_value_heads", "sliding_window", "layer_types")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_config_of_transformers_is_read_as_vllm_reads_it_or_refused(
    monkeypatch: pytest.MonkeyPatch, run_seed: int
) -> None:
    """With every key, and without each of those that a config.json may leave to the model's code. A usual run draws
    two fifths of the models: to make all configurations takes a core for a quarter of a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pytest.importorskip("vllm.config")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    convertors = pytest.importorskip(
        "vllm.transformers_utils.model_arch_config_convertor"
    )
    agreed = 0
    known = list(auto.CONFIG_MAPPING_NAMES)
    chosen = random.Random(run_seed).sample(known, draws(len(known)))
    for name in chosen:
        if SERVED_ELSEWHERE.match(name):
            continue
        try:
            whole = auto.CONFIG_MAPPING[name]().to_json_string(use_diff=False)
        except Exception:  # noqa: BLE001, S112 - it needs more than its defaults
            continue
        for dropped in DROPPED:
            plain = json.loads(whole)
            try:
                nested = (plain.get(key) for key in ("text_config", "llm_config"))
                inner = next((one for one in nested if isinstance(one, dict)), plain)
                if dropped and dropped not in inner:
                    continue
                inner.pop(dropped, None)
                config = auto.CONFIG_MAPPING[name].from_dict(dict(plain))
                text = config.get_text_config(decoder=True)
                kind = convertors.MODEL_ARCH_CONFIG_CONVERTORS.get(
                    name, convertors.ModelArchConfigConvertorBase
                )
                model = kind(config, text)
                wanted = (
                    model.get_num_hidden_layers(),
                    model.get_total_num_kv_heads(),
                    model.get_head_size(),
                )
            except Exception:  # noqa: BLE001, S112 - of configurations that need more than their defaults
                continue
            where = (name, dropped)
            text_of_file = json.dumps({**plain, "dtype": "bfloat16"}).encode()
            try:
                form = form_of(read_model_config(text_of_file, {}))
            except (InvalidModel, InvalidArgument):
                continue
            shared = getattr(text, "num_kv_shared_layers", 0) or 0
            found = form.layers + shared, form.heads or wanted[1], form.dim or form.mla
            assert found == wanted, where
            assert bool(form.mla) == model.is_deepseek_mla(), where
            sliding = "sliding_attention"
            kinds = getattr(text, "layer_types", None) or [sliding] * form.layers
            assert set(kinds) <= {"full_attention", sliding}, where
            windows = []
            if getattr(text, "sliding_window", None):
                cached = enumerate(kinds[: form.layers])
                windows = [layer for layer, kind in cached if kind == sliding]
            assert list(form.window_layers) == windows, where
            agreed += 1
    assert agreed > 0.2 * len(chosen)
