"""Every source root is in every list of them: pyproject.toml's, the Dockerfile's, .dockerignore's, the contracts'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dockerfile import Context, read_dockerfile
from tests.packaging.outside import PACKAGES, ROOT

ROOTS = set(PACKAGES)
STAGES = {stage.name: stage for stage in read_dockerfile((ROOT / "Dockerfile").read_text())[1]}


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return found


def roots_of_the_tree() -> set[str]:
    """Folders with Python files under `kvferry/`: what a checkout needs on its path."""
    return {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/kvferry/*/__init__.py")}


def test_the_tests_know_every_root() -> None:
    assert roots_of_the_tree() == ROOTS
    assert {"protocol", "plan", "scheduler", "worker", "connector", "cli"} <= ROOTS


def test_the_wheel_takes_every_root_and_an_editable_installation_too(tool: dict[str, Any]) -> None:
    build = tool["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    assert sorted(wheel["only-include"]) == sorted(f"{root}/kvferry" for root in ROOTS)
    assert sorted(wheel["sources"]) == sorted(ROOTS)
    assert sorted(build["dev-mode-dirs"]) == sorted(ROOTS)


def test_no_root_is_left_out_of_the_source_distribution(tool: dict[str, Any]) -> None:
    excluded = tool["hatch"]["build"]["targets"]["sdist"]["exclude"]
    assert not {one.strip("/").split("/")[0] for one in excluded} & ROOTS


def test_ruff_and_mypy_read_every_root(tool: dict[str, Any]) -> None:
    assert set(tool["ruff"]["src"]) == ROOTS
    assert set(tool["mypy"]["mypy_path"].split(":")) == ROOTS
    assert set(tool["mypy"]["files"]) >= ROOTS


def test_the_contracts_say_of_every_root_whom_it_may_import(tool: dict[str, Any]) -> None:
    names = {f"kvferry.{root}" for root in ROOTS}
    contracts = {one["name"]: one for one in tool["importlinter"]["contracts"]}
    layers = contracts["who may import whom"]["layers"]
    assert {name.strip() for layer in layers for name in layer.replace(":", "|").split("|")} == names
    (vllm,) = (one for one in contracts.values() if one.get("forbidden_modules") == ["vllm"])
    assert set(vllm["source_modules"]) == names - {"kvferry.connector"}


def test_the_image_copies_every_root_to_where_the_wheel_is_built() -> None:
    copied = {path: target for paths, target in STAGES["wheel"].copies() for path in paths}
    assert {path: copied.get(path) for path in ROOTS} == {root: root for root in ROOTS}


@pytest.mark.parametrize("root", sorted(ROOTS))
def test_the_build_context_has_every_file_of_a_root(root: str) -> None:
    context = Context(ROOT)
    files = [
        path.relative_to(ROOT) for path in (ROOT / root / "kvferry").rglob("*") if path.suffix in (".py", ".typed")
    ]
    assert len(files) > 3
    assert [str(path) for path in files if not context.has(path)] == []
    assert not context.has(Path(root, "kvferry", root, "__pycache__", "a.pyc"))
