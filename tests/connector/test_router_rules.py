"""Routers that have rules about connectors: Dynamo's worker goes by the name, llm-d's sidecar by a flag of its own.

The rules are those of `router_rules.json`, which says where they were read. Where Dynamo's package is installed (the
environment of `tests/next_vllm` has it) they are compared with it, and with llm-d's sources where `LLM_D_SOURCES` names
a folder of them (its package is a Go module).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.params import RemoteDecode, read_params
from tests.engine_core.offers import offer
from tests.harness.core.scheduler import tokens

RULES = json.loads(Path(__file__).with_name("router_rules.json").read_text())
MIGRATION = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
UNDER_VLLMS_NAME = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvferry.connector",
}
UNDER_ITS_OWN_NAME = {"kv_connector": "FerryConnector"}


@pytest.fixture
def dynamo() -> Any:
    """The module of Dynamo's package that has its rules; the package around it needs Dynamo's runtime."""
    rules = RULES["dynamo"]
    try:
        package = metadata.distribution(rules["package"])
    except metadata.PackageNotFoundError:
        pytest.skip(f"{rules['package']} is not installed")
    file = Path(str(package.locate_file(rules["file"])))
    spec = importlib.util.spec_from_file_location("dynamos_rules", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def llm_d() -> Path:
    """A folder of llm-d-router's sources."""
    folder = os.environ.get("LLM_D_SOURCES")
    if not folder:
        pytest.skip("LLM_D_SOURCES names no sources of llm-d-router")
    return Path(folder)


def engine_with(**transfer: Any) -> Any:
    """What Dynamo's worker looks at: a configuration of vLLM's."""
    defaults = {"engine_id": "engine", "kv_connector_extra_config": {}}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{**defaults, **transfer})
    )


def test_the_rules_of_dynamos_package_are_those_that_the_docs_go_by(
    dynamo: Any,
) -> None:
    rules = RULES["dynamo"]
    assert sorted(dynamo.KV_CONNECTOR_PROTOCOLS) == rules["connectors"]
    assert sorted(dynamo.MULTI_CONNECTOR_WRAPPERS) == rules["wrappers"]
    protocol = dynamo.make_kv_connector_protocol(engine_with(**UNDER_VLLMS_NAME))
    assert protocol.prefill_request_kv_transfer_params() == rules["prefill_params"]


def test_dynamo_takes_kvferry_under_vllms_name_and_hands_its_params_on_whole(
    dynamo: Any,
) -> None:
    protocol = dynamo.make_kv_connector_protocol(engine_with(**UNDER_VLLMS_NAME))
    params = offer(tokens(40))
    answer = SimpleNamespace(kv_transfer_params=params)
    assert protocol.decode_request_kv_transfer_params(answer) == params
    config = engine_with(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [UNDER_VLLMS_NAME]},
    )
    protocol = dynamo.make_kv_connector_protocol(config)
    assert protocol.decode_request_kv_transfer_params(answer) == params


def test_dynamo_refuses_kvferry_under_its_own_name(dynamo: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported kv_connector='FerryConnector'"):
        dynamo.make_kv_connector_protocol(engine_with(**UNDER_ITS_OWN_NAME))


def test_the_rules_of_llm_ds_sidecar_are_those_that_the_docs_go_by(
    llm_d: Path,
) -> None:
    rules = RULES["llm-d"]
    constants, options, prefill = (
        (llm_d / file).read_text() for file in rules["files"]
    )
    named = dict(re.findall(r'\b(KVConnector\w+)\s*=\s*"([\w-]+)"', constants))
    assert sorted(named.values()) == rules["protocols"]
    (default,) = re.findall(r"\bKVConnector:\s+(KVConnector\w+),", options)
    assert named[default] == rules["default"]
    # Both kinds of params of a prefill have these.
    fields = {name.replace("_", "") for name in rules["prefill_params"]}
    written = re.findall(r"\brequestField(\w+):\s+(?:true|false|nil),", prefill)
    assert fields <= {name.lower() for name in written}


@pytest.mark.parametrize("router", RULES)
def test_a_prefill_as_the_router_asks_for_it_is_one_for_another_engine(
    router: str,
) -> None:
    assert isinstance(read_params(RULES[router]["prefill_params"]), RemoteDecode)


def test_the_configuration_for_dynamo_in_the_docs_has_a_name_that_its_worker_takes() -> (
    None
):
    (config,) = (json.loads(text) for text in configs_under("### Dynamo"))
    assert config["kv_connector"] in RULES["dynamo"]["connectors"]
    assert config.items() >= UNDER_VLLMS_NAME.items()


def test_the_flag_for_llm_d_in_the_docs_is_a_protocol_that_its_sidecar_has() -> None:
    (named,) = set(re.findall(r"--kv-connector[= ]([\w-]+)", section("### llm-d")))
    assert named == RULES["llm-d"]["default"]
    assert {named, "offloading"} <= set(RULES["llm-d"]["protocols"])


def section(heading: str) -> str:
    """The part of docs/migration.md under a heading."""
    _, found, rest = MIGRATION.partition(f"\n{heading}\n")
    assert found, f"docs/migration.md has no section {heading}"
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def configs_under(heading: str) -> list[str]:
    """The configurations of vLLM's `--kv-transfer-config` in a section."""
    return re.findall(r"--kv-transfer-config '(\{.*\})'", section(heading))
