"""Every source root is in every list of them: pyproject.toml's, the Dockerfile's, .dockerignore's, the contracts'."""

from __future__ import annotations

from pathlib import Path

import tomllib

from tests.deploy.dockerfile import Context, read_dockerfile
from tests.packaging.outside import PACKAGES, ROOT

ROOTS = set(PACKAGES)
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_the_tests_know_every_root() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/kvferry/*/__init__.py")} == ROOTS


def test_the_wheel_the_source_distribution_and_an_editable_installation_have_every_root() -> None:
    build = TOOL["hatch"]["build"]
    assert set(build["targets"]["wheel"]["only-include"]) == {f"{root}/kvferry" for root in ROOTS}
    assert set(build["targets"]["wheel"]["sources"]) == ROOTS
    assert set(build["dev-mode-dirs"]) == ROOTS
    assert not {one.strip("/").split("/")[0] for one in build["targets"]["sdist"]["exclude"]} & ROOTS


def test_ruff_mypy_and_the_contracts_read_every_root() -> None:
    assert set(TOOL["ruff"]["src"]) == ROOTS
    assert set(TOOL["mypy"]["mypy_path"].split(":")) == ROOTS
    assert set(TOOL["mypy"]["files"]) >= ROOTS
    names = {f"kvferry.{root}" for root in ROOTS}
    contracts = {one["name"]: one for one in TOOL["importlinter"]["contracts"]}
    layers = contracts["who may import whom"]["layers"]
    assert {name.strip() for layer in layers for name in layer.replace(":", "|").split("|")} == names
    (vllm,) = (one for one in contracts.values() if one.get("forbidden_modules") == ["vllm"])
    assert set(vllm["source_modules"]) == names - {"kvferry.connector"}


def test_the_image_gets_every_file_of_every_root() -> None:
    stages = {stage.name: stage for stage in read_dockerfile((ROOT / "Dockerfile").read_text())[1]}
    copied = {path: target for paths, target in stages["wheel"].copies() for path in paths}
    assert {path: copied.get(path) for path in ROOTS} == {root: root for root in ROOTS}
    context = Context(ROOT)
    files = [
        path for root in ROOTS for path in (ROOT / root / "kvferry").rglob("*") if path.suffix in (".py", ".typed")
    ]
    assert len(files) > 100
    assert [path for path in files if not context.has(path.relative_to(ROOT))] == []
    assert not context.has(Path("plan", "kvferry", "plan", "__pycache__", "a.pyc"))
