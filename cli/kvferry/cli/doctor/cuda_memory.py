"""Memory on GPU 0 through the CUDA driver, without torch, which takes seconds to import."""

from __future__ import annotations

import ctypes
from typing import Any


class CudaUnavailable(Exception):
    """There is no CUDA driver or no GPU, or a driver call failed."""


class CudaMemory:
    """Bytes on GPU 0, in its primary context, which is made current.

    Args:
        length: in bytes.
        driver: libcuda; loaded by default.

    Raises `CudaUnavailable`.
    """

    def __init__(self, length: int, driver: Any = None) -> None:
        self.length = length
        self._driver = driver or _libcuda()
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        self.address = int(address.value)

    def fill(self, source: int) -> None:
        """Copy all of it from host memory at this address."""
        self._call("cuMemcpyHtoD_v2", *self._pair(self.address, source))

    def fetch(self, target: int) -> None:
        """Copy all of it to host memory at this address."""
        self._call("cuMemcpyDtoH_v2", *self._pair(target, self.address))

    def _pair(self, target: int, source: int) -> tuple[Any, ...]:
        return ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(self.length)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise CudaUnavailable(f"{name} gave {status}")


def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as missing:
        raise CudaUnavailable(str(missing)) from None
