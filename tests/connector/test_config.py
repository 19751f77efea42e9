"""`kv_connector_extra_config`: the stock connector's keys, kvferry's keys, and wrong ones, which stop the start."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvferry.connector.config import FerryConfig, check_role, known_keys, read_config
from kvferry.protocol.errors import InvalidConfig

PEER_DEFAULTS: dict[str, Any] = {
    "backends": ["UCX"],
    "num_threads": 4,
    "kv_lease_duration": 30,
    "kv_recompute_threshold": 64,
    "bidirectional_kv_xfer": False,
    "decoder_kv_blocks_ttl": 480,
    "engine_ttl": 3600.0,
    "enforce_handshake_compat": True,
    "push_registration_timeout": 480,
    "enable_cross_layers_blocks": "True",
}
WITHOUT_MEANING = {
    "enforce_handshake_compat",
    "push_registration_timeout",
    "enable_cross_layers_blocks",
}


def test_the_peers_values_mean_the_same_here() -> None:
    config = read_config(
        {"backends": ["UCX", "LIBFABRIC"], "num_threads": 7, "kv_lease_duration": 12.5}
    )
    assert (config.backends, config.num_threads, config.kv_lease_duration) == (
        ("UCX", "LIBFABRIC"),
        7,
        12.5,
    )
    turns = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": 60,
        "kv_recompute_threshold": 0,
    }
    assert {key: getattr(read_config(turns), key) for key in turns} == turns
    defaults = {
        key: value for key, value in PEER_DEFAULTS.items() if key != "num_threads"
    }
    assert read_config(defaults) == FerryConfig()
    assert FerryConfig().backends == tuple(PEER_DEFAULTS["backends"])


@pytest.mark.parametrize("key", sorted(PEER_DEFAULTS))
def test_a_key_of_the_peer_without_meaning_is_named_in_one_warning(
    key: str, ferry_log: pytest.LogCaptureFixture
) -> None:
    read_config({key: PEER_DEFAULTS[key]})
    said = [record.getMessage() for record in ferry_log.records]
    assert len(said) == (key in WITHOUT_MEANING)
    assert all(
        line.startswith(f"{key}={PEER_DEFAULTS[key]!r} has no effect: ")
        for line in said
    )


def test_our_own_keys_reach_the_configuration() -> None:
    ours: dict[str, Any] = {
        "lease_slots": 9,
        "max_leased_fraction": 0.5,
        "handshake_timeout_s": 1,
        "load_timeout_s": 2.5,
        "max_loads": 3,
        "staging_pool_bytes": 2 << 20,
        "direct_min_bytes": 4096,
        "mapped_reads": "off",
        "allowed_hosts": ("10.1.0.0/16", "*.prefill.example"),
        "prewarm_peers": ("10.1.2.3:5600", "[fd00::1]:65535", "p0.example:1"),
        "model_fingerprint": "llama",
        "description_file": "/run/kvferry/{engine_id}.json",
    }
    config = read_config(json.loads(json.dumps(ours)))
    assert {key: getattr(config, key) for key in ours} == ours
    assert isinstance(config.handshake_timeout_s, float)


def test_null_stands_for_the_default() -> None:
    assert (
        read_config(
            dict.fromkeys(field.name for field in dataclasses.fields(FerryConfig))
        )
        == FerryConfig()
    )


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("kv_lease_durations", "kv_lease_duration"),
        ("lease_slot", "lease_slots"),
        ("Backends", "backends"),
    ],
)
def test_an_unknown_key_is_refused_with_its_value_the_near_miss_and_all_valid_keys(
    key: str, near: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_config({key: 17})
    text = str(refused.value)
    assert text.startswith(
        f"kv_connector_extra_config: {key} is 17; did you mean {near}? one of "
    )
    assert all(valid in text for valid in known_keys())
    assert set(PEER_DEFAULTS) <= set(known_keys())


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("kv_lease_durations", "did you mean kv_lease_duration? one of "),
        ("shared_storage_path", "is ignored; one of "),
        ("lmcache.mp.host", "is ignored; one of "),
    ],
)
def test_under_the_stock_connectors_name_an_unknown_key_is_warned_of_and_ignored(
    key: str, said: str, ferry_log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidConfig):
        read_config({key: 17}, "FerryConnector")
    assert read_config({key: 17, "num_threads": 3}, "NixlConnector") == FerryConfig(
        num_threads=3
    )
    (record,) = ferry_log.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        f"{key}=17 is not a key of kvferry and is ignored; "
    )
    assert said in record.getMessage()


@pytest.mark.parametrize(
    ("text", "meant"),
    [("True", True), ("true", True), ("False", False), ("0", False), (1, True)],
)
def test_a_choice_may_be_quoted_as_in_the_upstream_guide(
    text: Any, meant: bool
) -> None:
    for name in ("NixlConnector", "FerryConnector"):
        config = read_config({"bidirectional_kv_xfer": text}, name)
        assert config.bidirectional_kv_xfer == meant


def test_a_configuration_of_an_earlier_release_starts_with_a_warning(
    ferry_log: pytest.LogCaptureFixture,
) -> None:
    assert read_config({"allow_cumem_allocator": True}) == FerryConfig()
    (record,) = ferry_log.records
    assert record.getMessage().startswith("allow_cumem_allocator=True has no effect: ")


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("kv_lease_duration", 1_000_000, "a number from 0.05 to 86400"),
        ("kv_lease_duration", "45", "a number from 0.05 to 86400"),
        ("kv_recompute_threshold", "128", "a whole number from 0 to 1073741824"),
        ("num_threads", 128, "a whole number from 0 to 64"),
    ],
)
@pytest.mark.parametrize("name", ["NixlConnector", "FerryConnector"])
def test_a_number_that_is_quoted_or_out_of_range_stops_the_start_under_any_name(
    key: str, value: Any, valid: str, name: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"{key} is .*; expected {valid}"):
        read_config({key: value}, name)


def test_an_empty_list_of_backends_is_the_default_as_in_the_stock_connector() -> None:
    assert read_config({"backends": []}, "NixlConnector").backends == ("UCX",)


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "backends": ["UCX", [1], [""], {}, 5, True],
    "num_threads": [-1, 65, 1.0, True, "4", [4]],
    "kv_lease_duration": [0, -1, 0.01, 86401, NAN, INF, True, "30", [30]],
    "bidirectional_kv_xfer": ["yes", "", 2, -1, 1.0, [], {}],
    "decoder_kv_blocks_ttl": [0, 0.01, 86400 * 7 + 1, NAN, "480", True],
    "kv_recompute_threshold": [-1, (1 << 30) + 1, 64.0, "64", False],
    "streaming": ["on", "", "Auto", "true", True, 1, ["auto"], {}],
    "prefix_pulls": ["on", "", "Auto", "true", True, 1, ["auto"], {}],
    "prefix_sources": [
        "10.1.2.3:5600",
        [5],
        ["p0"],
        ["p0:65536"],
        ["tcp://p0:1"],
        ["0.0.0.0:5600"],
        ["p0:1", "p0:1"],
        [f"p0:{port}" for port in range(1, 10)],
        True,
    ],
    "prefix_pull_min_tokens": [0, -1, (1 << 30) + 1, 256.0, "256", True],
    "lease_slots": [-1, (1 << 20) + 1, 1.5, "8", False],
    "max_leased_fraction": [0, -0.5, 1.01, NAN, "0.5", True],
    "engine_ttl": [NAN, INF, "3600", True, []],
    "max_peers": [0, -1, (1 << 20) + 1, 2.0, "8", True],
    "max_peer_labels": [-1, 1 << 20, 2.0, "8", True],
    "trace_dir": ["", 7, True, ["traces"]],
    "trace_max_bytes": [0, 1, -1, (1 << 40) + 1, 1e6, "1G", True],
    "failed_read_grace_s": [-1, 86401, NAN, "60", True],
    "handshake_timeout_s": [0, 601, NAN, "5", True],
    "load_timeout_s": [0, 3601, INF, "60", {}],
    "max_loads": [0, (1 << 16) + 1, 2.0, "1", None.__class__],
    "staging_pool_bytes": [-1, 1, (1 << 20) - 1, (1 << 40) + 1, 2.0**21, "64M", True],
    "direct_min_bytes": [0, (1 << 40) + 1, 16384.0, "16K", False],
    "mapped_reads": ["on", "", "Auto", "true", True, 1, ["auto"], {}],
    "allowed_hosts": [
        "10.1.2.3",
        [],
        [5],
        [""],
        ["10.1.2.3/16"],
        ["**"],
        ["a;b"],
        ["0.0.0.0"],
        ["fd00::%1/64"],
        ["10.1"],
        ["p0:5600"],
        True,
    ],
    "prewarm_peers": [
        "10.1.2.3:5600",
        [5],
        [""],
        ["p0"],
        ["p0:0"],
        ["p0:65536"],
        ["p0:x"],
        ["fd00::1:5600"],
        ["tcp://p0:1"],
        ["a;b:1"],
        ["0.0.0.0:5600"],
        ["[::]:5600"],
        ["fe80::1%eth0:5600"],
        ["p0:1"] * 257,
        True,
    ],
    "model_fingerprint": ["", "x" * 257, "a\nb", 5, ["a"], True],
    "description_file": ["", "x" * 4097, "a\0b", 5, ["a"], True],
}


def test_every_option_has_wrong_values_below() -> None:
    assert set(WRONG) == {field.name for field in dataclasses.fields(FerryConfig)}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in WRONG.items() for value in values],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_key_and_value(
    key: str, value: Any
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_config({key: value})
    assert refused.value.field == key
    assert f"{key} is {refused.value.shown_value}; expected " in str(refused.value)


def test_producers_to_prewarm_are_for_consumers_and_must_be_allowed() -> None:
    named = {"prewarm_peers": ["10.1.2.3:5600", "p0.example:5600"]}
    for role in ("kv_consumer", "kv_both"):
        check_role(read_config(named), role)
        check_role(
            read_config({**named, "allowed_hosts": ["10.1.0.0/16", "*.example"]}), role
        )
        with pytest.raises(
            InvalidConfig,
            match=r"prewarm_peers is 'p0\.example:5600'; .* allowed_hosts",
        ):
            check_role(read_config({**named, "allowed_hosts": ["10.1.0.0/16"]}), role)
    with pytest.raises(InvalidConfig, match=r"prewarm_peers .* kv_producer"):
        check_role(read_config(named), "kv_producer")


def test_sources_of_prefixes_must_be_allowed_where_a_list_says_who_is() -> None:
    named = {"prefix_sources": ["10.1.2.3:5600", "[fd00::7]:5600"]}
    for role in ("kv_consumer", "kv_producer", "kv_both"):
        check_role(read_config(named), role)
        check_role(read_config({**named, "allowed_hosts": ["*"]}), role)
        with pytest.raises(
            InvalidConfig,
            match=r"prefix_sources is '\[fd00::7\]:5600'; .* allowed_hosts",
        ):
            check_role(read_config({**named, "allowed_hosts": ["10.1.0.0/16"]}), role)


@pytest.mark.parametrize(
    "key", [option.name for option in dataclasses.fields(FerryConfig)]
)
def test_a_number_of_thousands_of_digits_is_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        read_config({key: 10**5000})
    assert refused.value.field == key
    assert len(str(refused.value)) < 1000
