"""`pip install kvferry` without extras: the wheel with its dependencies and no other package of this environment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PathDistribution
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.protocol.description_json import (
    decode_engine_json,
    from_engine_json,
    to_engine_json,
)
from tests.cli.plan.forms import read_form
from tests.link.channel import HOST, listening
from tests.packaging.outside import Installed, closure, link
from tests.protocol.samples import KEY
from tests.trace.example import write_example

DENSE = "layers=4,heads=8,dim=64"
DESCRIBED = msgspec.structs.replace(
    from_engine_json(engine_of_form(read_form(DENSE), "prefill-0")),
    mac_key=KEY,
    boot="ab" * 16,
)
EXTRA = "pip install 'kvferry[worker]'"
LARGE = ("torch", "nixl", "vllm", "triton")
FIND = f"import importlib.util; print(*(name for name in {LARGE} if importlib.util.find_spec(name)))"


@pytest.fixture(scope="module")
def light(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    (metadata,) = installed.folder.glob("*.dist-info")
    needs = closure(PathDistribution(metadata).requires or ())
    assert {"msgspec", "numpy", "pyzmq", "rich"} <= set(needs)
    made = replace(
        installed, libraries=link(needs.values(), tmp_path_factory.mktemp("light"))
    )
    assert made.python("-c", FIND) == "\n", (
        "a dependency brings one of the large packages"
    )
    return made


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The address of a listener."""
    with listening() as (listener, port):
        listener.publish(DESCRIBED)
        yield f"{HOST}:{port}"


def test_it_plans_describes_and_traces(light: Installed, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    timeline = tmp_path / "traces.json"
    drawn = light.python(
        "-m", "kvferry", "plan", f"{DENSE},tp=2", DENSE, "--svg", str(picture)
    )
    assert "TP 2" in drawn
    assert picture.read_text().endswith("</svg>\n")
    with engine() as address:
        described = light.python("-m", "kvferry", "describe", address, "--json")
    assert decode_engine_json(described.encode()) == to_engine_json(DESCRIBED)
    light.python(
        "-m", "kvferry", "trace", str(write_example(tmp_path)), "-o", str(timeline)
    )
    assert json.loads(timeline.read_text())["traceEvents"]


def test_what_needs_more_names_the_extra(light: Installed) -> None:
    command = [str(light.folder / "bin" / "kvferry"), "bench", "--connect", f"{HOST}:1"]
    assert EXTRA in light.failure(*command, expected=2)
    make_agent = (
        "from kvferry.worker.fabric.nixl import NixlFabric; NixlFabric('agent')"
    )
    assert EXTRA in light.failure("-c", make_agent, expected=1).splitlines()[-1]
    findings = json.loads(
        light.python("-m", "kvferry", "doctor", "--json", expected=1)
    )["findings"]
    found = {one["check"]: one for one in findings}
    assert [found[name]["do"] for name in ("torch", "nixl")] == [EXTRA, EXTRA]
    assert EXTRA in found["loopback DRAM"]["found"]
