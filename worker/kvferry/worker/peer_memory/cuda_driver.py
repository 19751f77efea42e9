"""CUDA's driver, for CUDA IPC: through the package `cuda-bindings`, which PyTorch's builds for CUDA bring along.

The driver, not the runtime: its functions are in `libcuda.so.1` alone, whichever runtime PyTorch has. Calls may come on
any thread, as the last user of a map may go on any; each makes the worker's context current for as long as it takes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from typing import Any

import numpy as np

from kvferry.worker.device import Device
from kvferry.worker.peer_memory.cuda_ipc import DriverAllocation
from kvferry.worker.peer_memory.port import NotMappable

logger = logging.getLogger(__name__)

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MASK = (1 << 63) - 1
_HANDLE_BYTES = 64
"""CUDA's `CU_IPC_HANDLE_SIZE`. The package gives the address of a handle; its bytes have no name in some versions."""


class CudaIpcDriver:
    """`IpcDriver` of a real device. Made on a thread that uses the device, when the caches are registered.

    Raises:
        NotMappable: the package is missing, or its driver cannot be used.
    """

    def __init__(self, device: Device) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise NotMappable(
                "the Python package cuda-bindings is missing, which PyTorch's builds for CUDA need"
            ) from None
        device.use()
        self._context = _checked(self._driver, self._driver.cuCtxGetCurrent())
        self._number = self._call("cuCtxGetDevice")
        self.device = self._uuid_of(self._number)
        # MIG instances are told by their name alone, e.g. "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
        name = self._call("cuDeviceGetName", 256, self._number)
        self._is_mig = b" MIG " in bytes(name)
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._call("cuStreamCreate", int(flags))

    def allocation_at(self, address: int) -> DriverAllocation:
        """See `IpcDriver`."""
        if self._is_mig:
            raise NotMappable("MIG instances have no CUDA IPC between them")
        attributes = self._driver.CUpointer_attribute
        if not self._call(
            "cuPointerGetAttribute",
            attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            address,
        ):
            raise NotMappable(_why_not_exported())
        generation = self._call(
            "cuPointerGetAttribute",
            attributes.CU_POINTER_ATTRIBUTE_BUFFER_ID,
            address,
        )
        start, num_bytes = self._range(address)
        return DriverAllocation(start, num_bytes, int(generation) & _MASK)

    def export(self, start: int) -> bytes:
        """See `IpcDriver`."""
        handle = self._call("cuIpcGetMemHandle", start)
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes, device: str) -> DriverAllocation:
        """See `IpcDriver`."""
        self._check_reach(device)
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        start = int(self._call("cuIpcOpenMemHandle", opened, int(lazily)))
        try:
            _, num_bytes = self._range(start)
        except NotMappable:
            self.close(start)
            raise
        return DriverAllocation(start, num_bytes, 0)

    def close(self, start: int) -> None:
        """See `IpcDriver`."""
        try:
            self._call("cuIpcCloseMemHandle", start)
        except NotMappable as refused:
            logger.warning("mapped memory of a producer stays mapped: %s", refused)

    def read(self, address: int, num_bytes: int) -> bytes:
        """See `IpcDriver`."""
        found = np.empty(num_bytes, dtype=np.uint8)
        # On a stream of its own: on the default one it would wait for the model's work.
        self._call(
            "cuMemcpyDtoHAsync", found.ctypes.data, address, num_bytes, self._stream
        )
        self._call("cuStreamSynchronize", self._stream)
        return found.tobytes()

    def _check_reach(self, device: str) -> None:
        """Refuse a device that is visible here and that this one cannot read. One that is not visible is tried.

        Raises:
            NotMappable: there is no peer access.
        """
        if device == self.device:
            return
        for number in range(int(self._call("cuDeviceGetCount"))):
            other = self._call("cuDeviceGet", number)
            if self._uuid_of(other) == device and not self._call(
                "cuDeviceCanAccessPeer", self._number, other
            ):
                raise NotMappable(
                    f"GPU {self.device} has no peer access to GPU {device}"
                )

    def _range(self, address: int) -> tuple[int, int]:
        """Start and size of the driver's allocation that an address lies in."""
        start, num_bytes = self._call("cuMemGetAddressRange", address)
        return int(start), int(num_bytes)

    def _uuid_of(self, number: Any) -> str:
        return bytes(self._call("cuDeviceGetUuid", number).bytes).hex()

    def _call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver returns.

        Raises:
            NotMappable: the driver's error.
        """
        driver = self._driver
        _checked(driver, driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        try:
            return _checked(driver, getattr(driver, name)(*arguments), name)
        finally:
            driver.cuCtxPopCurrent()


def _checked(
    driver: Any, returned: tuple[Any, ...], name: str = "cuCtxGetCurrent"
) -> Any:
    """The values that a function has returned beside its error: none, one, or several.

    Raises:
        NotMappable: the error is one.
    """
    error, *values = returned
    if error != driver.CUresult.CUDA_SUCCESS:
        raise NotMappable(f"{name}: {getattr(error, 'name', error)}")
    if len(values) == 1:
        return values[0]
    return tuple(values)


def _why_not_exported() -> str:
    """Why memory of this process has no handle, as far as its environment tells."""
    for variable in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(variable, "").lower():
            return f"its caches are in expandable segments ({variable})"
    return (
        "its caches are not of cudaMalloc: sleep mode's allocator (cumem) and others of virtual memory "
        "have no handles"
    )
