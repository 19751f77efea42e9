"""vLLM finds the connector: by module and either name, or, through the entry point, by name alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllm.plugins
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvferry.connector
from kvferry.connector.connector import FerryConnector as TheClass
from kvferry.connector.plugin import register

IMPORT = """
import sys, kvferry.connector.plugin
print(*{name.partition(".")[0] for name in sys.modules} & {"torch", "nixl", "nixl_cu12", "vllm", "zmq", "numpy"})
"""


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry)
    )
    KVConnectorFactory._registry.pop("FerryConnector", None)


def test_importing_the_plugin_costs_no_torch_no_nixl_and_no_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == ""


def test_vllm_finds_the_class_by_name_after_it_has_loaded_its_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="FerryConnector"):
        KVConnectorFactory.get_connector_class_by_name("FerryConnector")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setenv("VLLM_PLUGINS", "kvferry")
    vllm.plugins.load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("FerryConnector") is TheClass
    config = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is TheClass
    assert KVConnectorFactory.supports_hma_config(config)


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("FerryConnector") is TheClass


def test_registering_leaves_vllms_own_connector_of_that_name_alone() -> None:
    before = KVConnectorFactory._registry["NixlConnector"]
    register()
    assert KVConnectorFactory._registry["NixlConnector"] is before


@pytest.mark.parametrize("name", ["NixlConnector", "FerryConnector"])
def test_with_the_module_named_both_names_are_the_same_class(name: str) -> None:
    config = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path="kvferry.connector",
        kv_role="kv_both",
    )
    assert KVConnectorFactory.get_connector_class(config) is TheClass
    assert getattr(kvferry.connector, name) is TheClass
