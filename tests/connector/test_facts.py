"""Facts on the wire from vLLM's own configuration."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import ParallelConfig

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import (
    Siblings,
    can_stream,
    check_supported,
    facts_of,
    interleave_of,
    sharding_of,
    siblings_of,
)
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Interleave, Place
from tests.connector.test_fingerprint import safetensors
from tests.harness.core.configs import kv_cache_config, vllm_config


def engine_config(**changed: Any) -> Any:
    """A real configuration; `part__field` changes a field of one of its parts afterwards."""
    config = copy.copy(vllm_config("NixlConnector", module="kvferry.connector"))
    for path, value in changed.items():
        part, field = path.split("__")
        setattr(config, part, copy.copy(getattr(config, part)))
        setattr(getattr(config, part), field, value)
    return config


def facts(config: FerryConfig = FerryConfig(), **changed: Any) -> Any:  # noqa: B008 - it is frozen
    return facts_of(engine_config(**changed), config)


def test_the_facts_of_a_plain_engine() -> None:
    reported = facts()
    assert reported == facts()
    assert Path(reported.model).is_dir()
    assert reported.fingerprint.startswith("config:"), "the test's model has no weights"
    assert (reported.dtype, reported.cache_dtype, reported.quantization) == (
        "float32",
        "float32",
        "none",
    )
    assert (reported.max_model_tokens, reported.speculative) == (512, "none")


def test_an_operators_name_for_the_weights_stands_in_place_of_the_fingerprint() -> None:
    assert facts(FerryConfig(model_fingerprint="llama-v7")).fingerprint == "llama-v7"


def test_weights_on_disk_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    seen = []
    for fill in (1, 2):
        safetensors(tmp_path / "model.safetensors", fill=fill)
        seen.append(facts(model_config__model=str(tmp_path)).fingerprint)
    assert seen[0] != seen[1]
    assert all(one.startswith("weights:") for one in seen)


def test_random_weights_are_those_of_their_seed_whatever_lies_on_disk(
    tmp_path: Path,
) -> None:
    safetensors(tmp_path / "model.safetensors")
    dummy: Any = {
        "model_config__model": str(tmp_path),
        "load_config__load_format": "dummy",
    }
    one, same, another = (
        facts(model_config__seed=seed, **dummy).fingerprint for seed in (1, 1, 2)
    )
    assert one == same != another
    assert one.startswith("config:")


def test_a_configuration_that_changes_while_a_model_is_loaded_does_not_change_the_facts(
    tmp_path: Path,
) -> None:
    """vLLM completes Falcon-H1's in the workers, so that an engine's scheduler and its workers would differ."""
    safetensors(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    seen = []
    for loaded, overrides in ((False, {}), (True, {}), (False, {"rope_theta": 5.0})):
        config = engine_config(
            model_config__model=str(tmp_path), model_config__hf_overrides=overrides
        )
        if loaded:
            config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
            config.model_config.hf_config.partial_rotary_factor = 1.0
        seen.append(facts_of(config, FerryConfig()))
    assert seen[0] == seen[1] != seen[2]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 128}')
    assert facts(model_config__model=str(tmp_path)) not in seen
    assert len({one.fingerprint for one in seen}) == 1, "it is of the weights alone"


@pytest.mark.parametrize("flag", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_an_engine_that_can_sleep_may_start(flag: str) -> None:
    check_supported(engine_config(**{f"model_config__{flag}": True}))


def test_an_executor_that_keeps_the_reports_of_all_stages_but_the_last_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = {
        "parallel_config__pipeline_parallel_size": 2,
        "parallel_config__distributed_executor_backend": "ray",
    }
    check_supported(engine_config(**stages))
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    check_supported(
        engine_config(**{**stages, "parallel_config__pipeline_parallel_size": 1})
    )
    if "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" not in envs.environment_variables:
        # 0.33 has only the executor that passes all reports on.
        check_supported(engine_config(**stages))
        return
    with pytest.raises(InvalidConfig, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND"):
        check_supported(engine_config(**stages))


def test_tokens_are_shared_out_in_runs_of_vllms_length() -> None:
    assert interleave_of(engine_config(), Place(tp=1)) == Interleave()
    sizes = {
        "parallel_config__decode_context_parallel_size": 4,
        "parallel_config__cp_kv_cache_interleave_size": 16,
    }
    assert interleave_of(engine_config(**sizes), Place(tp=3, dcp=2)) == Interleave(
        ranks=4, rank=2, run_tokens=16
    )


@pytest.mark.parametrize(("draft_heads", "uniform"), [(2, True), (1, False)])
def test_a_drafter_with_other_heads_makes_them_uncertain(
    draft_heads: int, uniform: bool
) -> None:
    config = engine_config()
    draft = SimpleNamespace(
        get_total_num_kv_heads=lambda: draft_heads,
        hf_text_config=SimpleNamespace(to_dict=dict),
    )
    config.speculative_config = SimpleNamespace(
        method="eagle", draft_model_config=draft
    )
    assert sharding_of(config, Place()).uniform is uniform


def test_a_separate_cache_dtype_and_quantised_weights_are_reported() -> None:
    reported = facts(
        cache_config__cache_dtype="fp8_e4m3", model_config__quantization="awq"
    )
    assert (reported.dtype, reported.cache_dtype, reported.quantization) == (
        "float32",
        "fp8_e4m3",
        "awq",
    )


def test_a_draft_method_is_reported() -> None:
    config = engine_config()
    config.speculative_config = SimpleNamespace(method="mtp")
    assert facts_of(config, FerryConfig()).speculative == "mtp"


CANNOT_STREAM: dict[str, Any] = {
    "a consumer": {"kv_transfer_config__kv_role": "kv_consumer"},
    "a host buffer": {
        "device_config__device_type": "cuda",
        "kv_transfer_config__kv_buffer_device": "cpu",
    },
}


@pytest.mark.parametrize("changed", CANNOT_STREAM.values(), ids=CANNOT_STREAM)
def test_engines_whose_prompts_are_not_read_while_they_are_computed(
    changed: dict[str, Any],
) -> None:
    assert can_stream(engine_config(), kv_cache_config(8), FerryConfig())
    assert not can_stream(engine_config(**changed), kv_cache_config(8), FerryConfig())


def test_of_hybrids_what_grows_with_the_prompt_is_read_while_it_is_computed() -> None:
    for make in (
        partial(kv_cache_config, 8, window=32),
        partial(kv_cache_config, 8, states=1),
    ):
        assert can_stream(engine_config(), make(), FerryConfig())
        nothing_grows = make()
        del nothing_grows.kv_cache_groups[0]
        assert not can_stream(engine_config(), nothing_grows, FerryConfig())


def test_a_layer_that_is_not_causal_spoils_what_grows_beside_it() -> None:
    caches = kv_cache_config(8, window=32)
    assert can_stream(engine_config(), caches, FerryConfig())
    full, second = caches.kv_cache_groups
    second.kv_cache_spec = dataclasses.replace(full.kv_cache_spec, non_causal=True)
    assert not can_stream(engine_config(), caches, FerryConfig())


def test_switched_off_or_with_drafters_no_prompt_is_read_while_it_is_computed() -> None:
    config = engine_config()
    assert not can_stream(config, kv_cache_config(8), FerryConfig(streaming="off"))
    config.speculative_config = SimpleNamespace(method="mtp")
    assert not can_stream(config, kv_cache_config(8), FerryConfig())


def siblings(
    rank: int,
    *,
    local_rank: int | None = None,
    is_moe: bool,
    backend: str = "mp",
    **sizes: Any,
) -> Siblings:
    """As `EngineCoreProc.run_engine_core` makes the configuration of one data-parallel rank."""
    parallel = ParallelConfig(**sizes)
    parallel.data_parallel_rank_local = rank if local_rank is None else local_rank
    parallel.data_parallel_index = rank
    # Its own check needs Ray.
    object.__setattr__(parallel, "data_parallel_backend", backend)
    if is_moe:
        parallel.data_parallel_rank = rank
    else:
        parallel.reconfigure_for_independent_dp_rank()
    config: Any = SimpleNamespace(parallel_config=parallel)
    return siblings_of(config)


def ports(*ranks: int) -> tuple[int, ...]:
    return tuple(envs.VLLM_NIXL_SIDE_CHANNEL_PORT + rank for rank in ranks)


FOUR: dict[str, Any] = {"data_parallel_size": 4, "data_parallel_size_local": 4}
TWO_HOSTS: dict[str, Any] = {
    "data_parallel_size": 4,
    "data_parallel_size_local": 2,
    "data_parallel_master_ip": "10.0.0.1",
}


@pytest.mark.parametrize("is_moe", [True, False], ids=["moe", "dense"])
def test_every_rank_of_one_host_names_all_others(is_moe: bool) -> None:
    """vLLM tells the ranks of a dense model that they are alone, and distributes prompts over them all the same."""
    for rank in range(4):
        others = [other for other in range(4) if other != rank]
        assert siblings(rank, is_moe=is_moe, **FOUR) == Siblings(ports(*others), True)


@pytest.mark.parametrize("is_moe", [True, False], ids=["moe", "dense"])
def test_an_engine_without_data_parallelism_has_no_siblings(is_moe: bool) -> None:
    assert siblings_of(engine_config()) == Siblings((), True)
    assert siblings(0, is_moe=is_moe) == Siblings((), True)


@pytest.mark.parametrize(
    ("rank", "is_moe", "here"),
    [(1, True, [0]), (2, True, [3]), (1, False, [0]), (2, False, []), (3, False, [2])],
)
def test_ranks_behind_a_front_end_on_another_host_are_not_all_named(
    rank: int, is_moe: bool, here: list[int]
) -> None:
    found = siblings(rank, local_rank=rank % 2, is_moe=is_moe, **TWO_HOSTS)
    assert found == Siblings(ports(*here), False)


def test_a_front_end_of_its_own_gives_prompts_to_the_ranks_of_its_host_alone() -> None:
    hybrid: dict[str, Any] = {**TWO_HOSTS, "data_parallel_hybrid_lb": True}
    for rank, other in ((2, 3), (3, 2)):
        found = siblings(rank, local_rank=rank - 2, is_moe=True, **hybrid)
        assert found == Siblings(ports(other), True)
    # How many ranks of a dense model are here vLLM does not tell.
    found = siblings(3, local_rank=1, is_moe=False, **hybrid)
    assert found == Siblings(ports(2), False)
    external: dict[str, Any] = {
        **TWO_HOSTS,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": True,
    }
    assert siblings(3, local_rank=0, is_moe=True, **external) == Siblings((), True)


@pytest.mark.parametrize("is_moe", [True, False], ids=["moe", "dense"])
def test_where_ray_puts_ranks_is_not_known(is_moe: bool) -> None:
    found = siblings(1, is_moe=is_moe, backend="ray", **FOUR)
    assert found == Siblings(ports(0), False)
