"""torch's operators on the device: each kernel for CUDA is replaced by the CPU's, on the same bytes."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as tree

from tests.gpu_emulation.emulation import graphs

_AS_THEY_ARE = {
    "_has_compatible_shallow_copy_type",
    "_local_scalar_dense",
    "_pin_memory",
    "_reshape_alias",
    "alias",
    "as_strided",
    "empty",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "pin_memory",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
}
"""Operators that allocate, or only look at, memory of the device: they launch no kernel."""

_BY_OTHER_WAYS = {"aten::copy_"}
"""Operators that reach CUDA's kernels without being registered for it."""

_libraries: dict[str, Any] = {}
"""They unregister what they registered when they are collected."""


def install(_module: ModuleType) -> None:
    """Replace all kernels that are registered for CUDA, and what replays them."""
    graphs.install()
    warnings.filterwarnings(
        "ignore", message=".*Overriding a previously registered kernel.*"
    )
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    for name in sorted(registered | _BY_OTHER_WAYS):
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if (
            namespace != "aten"
            or packet in _AS_THEY_ARE
            or packet.startswith("_sparse")
        ):
            continue
        found = getattr(
            getattr(torch.ops.aten, packet, None), overload or "default", None
        )
        if found is not None:
            register("aten", operator, found)


def register(namespace: str, name: str, function: Callable[..., Any]) -> None:
    """Make a function on CPU tensors the kernel of an operator on the device."""
    if namespace not in _libraries:
        made: Any = torch.library.Library
        _libraries[namespace] = made(namespace, "IMPL", "CUDA")
    _libraries[namespace].impl(name, on_the_cpu(function), "CUDA", allow_override=True)


def on_the_cpu(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for tensors on the device: called with CPU tensors over the same memory."""

    def run(*args: Any, **kwargs: Any) -> Any:
        launch = _Launch(operator, args, kwargs)
        result = launch.run()
        graphs.note(lambda: launch.run_into(result))
        return result

    return run


class _Launch:
    """An operator with the arguments that it was called with."""

    def __init__(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._operator = operator
        self._args = args
        self._kwargs = (
            {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
        )
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the id of a CPU tensor that the operator is given: that tensor, and whose memory it has."""
        self._device: torch.device | None = None
        """That of the first argument that has one: there is what is new, too."""

    def run(self) -> Any:
        """Its result; what is new in it is on the device too."""
        return tree.tree_map(self._up, self._call())

    def run_into(self, result: Any) -> None:
        """The same again, as a graph does: what was new in its result is written where that lies."""
        known = tree.tree_leaves(result)
        for here, there in zip(tree.tree_leaves(self._call()), known, strict=True):
            if isinstance(here, torch.Tensor) and id(here) not in self._given:
                _copy(there, here)

    def _call(self) -> Any:
        self._given.clear()
        self._device = None
        args, kwargs = tree.tree_map(self._down, (self._args, self._kwargs))
        result = self._operator(*args, **kwargs)
        for here, there in self._given.values():
            if here.size() != there.size():  # of an `out` that the operator has resized
                there.resize_(here.size())
                _copy(there, here.contiguous())
        return result

    def _down(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            here = value
            if value.device.type == "cuda":
                here = cpu_view(value)
                self._device = self._device or value.device
            self._given[id(here)] = (here, value)
            return here
        if isinstance(value, torch.device) and value.type == "cuda":
            self._device = self._device or value
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def _up(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = self._given.get(id(value))
        device = self._device or torch.device("cuda")
        return known[1] if known else _on_the_device(value, device)


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of one on the device. It does not keep that memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_the_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
    )
    _copy(made, tensor)
    return made


def _copy(there: torch.Tensor, here: torch.Tensor) -> None:
    """The bytes of a tensor into another of the same size and strides."""
    if not here.numel():
        return
    last = sum(
        (size - 1) * stride
        for size, stride in zip(here.size(), here.stride(), strict=True)
    )
    ctypes.memmove(there.data_ptr(), here.data_ptr(), (last + 1) * here.element_size())
