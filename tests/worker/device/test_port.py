"""`torch.cuda` is used through the port, and nothing else of the product reaches a device by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvferry.worker.device import Cuda
from tests.packaging.outside import PACKAGES

REPOSITORY = Path(__file__).resolve().parents[3]
PORT = "worker/kvferry/worker/device.py"
ASKS = {"cli/kvferry/cli/transfer/process.py": {"is_available"}}
"""What may be used elsewhere: a child process of `kvferry bench` and `doctor` asks whether there is a GPU."""
ON_DEVICE = {"cuda", "pin_memory", "record_stream"}
"""Names that are of CUDA on whatever object, or as an argument."""


def names_of_cuda(source: str) -> set[str]:
    """What is used of `torch.cuda`; `*` for the module itself, by whatever way."""
    found, tree = set[str](), ast.parse(source)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    before_a_dot = {id(node.value) for node in attributes}
    for node in attributes:
        if ast.unparse(node.value) == "torch.cuda":
            found.add(node.attr)
        elif node.attr in ON_DEVICE and id(node) not in before_a_dot:
            found.add("*")
    for other in ast.walk(tree):
        if isinstance(other, ast.keyword) and other.arg in ON_DEVICE:
            found.add("*")
        elif isinstance(other, ast.Import | ast.ImportFrom):
            prefix = f"{other.module}." if isinstance(other, ast.ImportFrom) else ""
            if any(
                f"{prefix}{name.name}".startswith("torch.cuda") for name in other.names
            ):
                found.add("*")
    return found


def modules() -> dict[str, str]:
    """The sources of the product, by path."""
    paths = (path for root in PACKAGES for path in (REPOSITORY / root).rglob("*.py"))
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
    }


def test_only_the_port_uses_cuda() -> None:
    found = {
        path: names
        for path, source in modules().items()
        if path != PORT and (names := names_of_cuda(source))
    }
    assert found == ASKS


def test_the_port_uses_of_cuda_what_the_stand_in_has() -> None:
    tree = ast.parse(modules()[PORT])
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._cuda"
    }
    assert called == {name for name in vars(Cuda) if not name.startswith("_")}


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "from torch.cuda import Event",
        "from torch import cuda",
        "import torch.cuda as c",
        "runtime = torch.cuda",
        "tensor.cuda()",
        "torch.empty(4, pin_memory=True)",
    ],
)
def test_every_way_to_cuda_is_found(source: str) -> None:
    assert names_of_cuda(source)
