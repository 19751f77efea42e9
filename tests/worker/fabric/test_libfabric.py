"""NIXL's backend LIBFABRIC over a software provider, where its plugin can be loaded: docs/compatibility.md, Fabrics."""

from __future__ import annotations

import os

import pytest

from kvferry.cli.doctor.devices import Machine, load_error, plugins
from kvferry.worker.fabric.nixl import AgentConfig, NixlFabric
from tests.harness.rig import rig_of


@pytest.mark.parametrize("provider", ["tcp", "sockets"])
def test_prompts_are_handed_over_over_libfabric(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [
        load_error(plugin, Machine(environ=os.environ)) for plugin in plugins().values()
    ]
    if all(errors):
        pytest.skip(
            f"NOT TESTED: NIXL's plugin LIBFABRIC does not load: {'; '.join(errors)}"
        )
    monkeypatch.setenv("FI_PROVIDER", provider)
    with rig_of("nixl") as rig:
        monkeypatch.setattr(
            rig,
            "make_fabric",
            lambda name: NixlFabric(name, AgentConfig(backends=("LIBFABRIC",))),
        )
        producer, consumer = rig.pair()
        for seed in range(3):
            rig.transfer(producer, consumer, seed=seed)
