"""The shape of the repository: one namespace over all roots, and who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.packaging.outside import PACKAGES as ROOTS

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = {"protocol": ("version.py",), "cli": ("__main__.py",)}
"""Beside the packages, in the namespace itself."""
CORE = ("kvferry.protocol", "kvferry.plan", "kvferry.scheduler")

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {names!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
loaded = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(name for name in loaded if name.startswith(("torch", "nixl", "vllm", "triton", "transformers"))))
"""


def heavy_modules_after_importing(*names: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(names=names)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_kvferry_is_a_namespace_package_in_every_root() -> None:
    """One `__init__.py` in any of them would hide all others."""
    for root in ROOTS:
        assert (REPOSITORY / root / "kvferry").is_dir()
        assert not (REPOSITORY / root / "kvferry" / "__init__.py").exists()
    assert not list(REPOSITORY.glob("*/kvferry/__init__.py"))


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_holds_one_typed_package_of_its_own_name(root: str) -> None:
    package = REPOSITORY / root / "kvferry" / root
    found = {
        path
        for path in (REPOSITORY / root / "kvferry").iterdir()
        if path.name != "__pycache__"
    }
    assert found - {package} == {
        package.parent / name for name in MODULES.get(root, ())
    }
    assert (package / "py.typed").exists()
    assert (package / "__init__.py").exists()


def test_no_two_classes_of_the_product_share_a_name() -> None:
    """A name in a stack trace or a search means one thing."""
    places = defaultdict[str, list[str]](list)
    for root in ROOTS:
        for path in sorted((REPOSITORY / root / "kvferry").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(REPOSITORY)))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("name", CORE)
def test_every_module_of_the_core_imports_without_torch_nixl_and_vllm(
    name: str,
) -> None:
    assert heavy_modules_after_importing(name) == ""
