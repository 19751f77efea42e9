"""Only `connector/vllm/` depends on vLLM's internals: found in the sources, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry.connector

CONNECTOR = Path(kvferry.connector.__file__).parent
FILES = sorted(
    path.relative_to(CONNECTOR).as_posix()
    for path in CONNECTOR.rglob("*.py")
    if path.relative_to(CONNECTOR).parts[0] != "vllm"
)

PUBLIC = (
    "vllm.config",
    "vllm.distributed",
    "vllm.envs",
    "vllm.model_executor.layers.attention_layer_base",
)
"""Configuration, the API of connectors with the process groups, environment variables, the base class of layers."""

EXCEPTIONS = {
    (
        "connector.py",
        "vllm.v1.metrics.cache_hit_source",
    ),  # the value that `_cache_hit_source` takes
    (
        "layout/discovery.py",
        "vllm.v1.kv_cache_interface",
    ),  # the specs that vLLM gives a connector
}

OWN = ("self", "cls", "super()", "os")


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """The modules of vLLM that a file imports when it runs: types are not among them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "vllm":
            yield from (f"vllm.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "vllm.v1":
            yield from (f"vllm.v1.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        yield from runtime_imports(node)


def foreign_privates(tree: ast.AST) -> Iterator[str]:
    """Private attributes of an object that is not the class's own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        owner = ast.unparse(node.value)
        if not node.attr.startswith("__") and owner not in OWN:
            yield f"{owner}.{node.attr}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_outside_the_adapter_uses_what_vllm_gives_connectors_only(
    name: str,
) -> None:
    tree = ast.parse((CONNECTOR / name).read_text(encoding="utf-8"))
    used = {
        module for module in runtime_imports(tree) if module.partition(".")[0] == "vllm"
    }
    internal = {
        module
        for module in used
        if not module.startswith(PUBLIC) and (name, module) not in EXCEPTIONS
    }
    assert not internal, "it belongs in connector/vllm/"
    assert list(foreign_privates(tree)) == []


def test_every_exception_is_one() -> None:
    for name, module in EXCEPTIONS:
        tree = ast.parse((CONNECTOR / name).read_text(encoding="utf-8"))
        assert module in set(runtime_imports(tree)), (
            f"{name} does not import {module} any more"
        )
