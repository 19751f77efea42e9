"""The start with a version of vLLM that kvferry was not tested with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvferry.cli.doctor.versions import VLLM
from kvferry.connector.vllm.version import SUPPORTED, check_vllm_version, is_supported
from kvferry.protocol.errors import InvalidConfig, UnsupportedVllm

TRANSFER = SimpleNamespace(
    kv_connector="NixlConnector", kv_connector_module_path="kvferry.connector"
)
OTHERS = [
    "0.31.9",
    "0.34.0",
    "0.34.0rc1",
    "0.33.0rc1",
    "0.320.0",
    "1.32.0",
    "0.32.0rc1",
    "0.32.1.dev7+g12ab",
    "dev",
    "",
]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    check_vllm_version.cache_clear()
    yield
    check_vllm_version.cache_clear()


@pytest.mark.parametrize(
    "version",
    [
        "0.32.0",
        "0.32.0+cpu",
        "0.32.7",
        "0.32.1rc1",
        "0.32.1.post1",
        "0.32.0+cu129.git12",
        "0.33.0",
        "0.33.1rc1",
    ],
)
def test_what_was_run_and_its_patches_start(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert is_supported(version)
    assert KVConnectorFactory.get_connector_class(TRANSFER).__name__ == "FerryConnector"


@pytest.mark.parametrize("version", OTHERS)
def test_any_other_version_stops_the_start_and_says_what_to_install(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedVllm) as refused:
        KVConnectorFactory.get_connector_class(TRANSFER)
    assert isinstance(refused.value, InvalidConfig)
    assert str(refused.value).startswith(
        f"vLLM: version is {version!r}; expected >=0.32,<0.34"
    )
    assert "pip install 'vllm>=0.32,<0.34'" in str(refused.value)
    assert f"KVFERRY_ALLOW_VLLM={version} " in str(refused.value)


def test_an_operator_may_try_one_version_and_is_warned(
    monkeypatch: pytest.MonkeyPatch, ferry_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setenv("KVFERRY_ALLOW_VLLM", "0.34.0")
    for _ in range(2):
        assert (
            KVConnectorFactory.get_connector_class(TRANSFER).__name__
            == "FerryConnector"
        )
    assert [
        (record.levelname, record.getMessage()) for record in ferry_log.records
    ] == [
        (
            "WARNING",
            "vLLM 0.34.0 was never run with kvferry; KVFERRY_ALLOW_VLLM allows it",
        )
    ]


@pytest.mark.parametrize("allowed", ["0.34.1", "1", "true", ""])
def test_what_allows_another_version_allows_only_that_one(
    allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setenv("KVFERRY_ALLOW_VLLM", allowed)
    with pytest.raises(UnsupportedVllm):
        KVConnectorFactory.get_connector_class(TRANSFER)


def test_package_doctor_and_start_agree() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
        "project"
    ]
    assert project["optional-dependencies"]["vllm"] == [
        "kvferry[worker]",
        f"vllm{SUPPORTED}",
    ]
    assert VLLM == SUPPORTED
