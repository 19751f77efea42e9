"""torch's operators on the device: each kernel for CUDA is replaced by the CPU's, on the same bytes."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as tree

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
    """Replace all kernels that are registered for CUDA."""
    warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    for name in sorted(registered | _BY_OTHER_WAYS):
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if namespace != "aten" or packet in _AS_THEY_ARE or packet.startswith("_sparse"):
            continue
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
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
        given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def down(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device.type != "cuda":
                    given[id(value)] = (value, value)
                    return value
                here = cpu_view(value)
                given[id(here)] = (here, value)
                return here
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                return None
            return value

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            known = given.get(id(value))
            return known[1] if known else _on_the_device(value)

        args, kwargs = tree.tree_map(down, (args, kwargs))
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result = operator(*args, **kwargs)
        for here, there in given.values():
            if here.size() != there.size():  # of an `out` that the operator has resized
                there.resize_(here.size())
                _copy(there, here.contiguous())
        return tree.tree_map(up, result)

    return run


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


def _on_the_device(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
    _copy(made, tensor)
    return made


def _copy(there: torch.Tensor, here: torch.Tensor) -> None:
    """The bytes of a tensor into another of the same size and strides."""
    if not here.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(here.size(), here.stride(), strict=True))
    ctypes.memmove(there.data_ptr(), here.data_ptr(), (last + 1) * here.element_size())
