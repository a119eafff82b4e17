"""The real CUDA kernels behind the executor without a GPU: sources compiled for the host, memory of a HostDevice."""

from __future__ import annotations

from typing import Any

from tests.cuda.emulate import EmulatedLauncher
from tests.cuda.host_device import HostDevice
from worker.cuda.cuda_kernels import CudaKernels


class ModelLauncher(EmulatedLauncher):
    """Launches are queued on the host device, so that graphs record them."""

    def __init__(self, device: HostDevice) -> None:
        super().__init__()
        self._device = device

    def launch(self, function: Any, *arguments: Any, **options: Any) -> None:
        run = super().launch
        self._device.submit(function.name, lambda: run(function, *arguments, **options))


class ShapesOnlyLauncher:
    """For predictions of bytes: the facts of an H200, and nothing to launch."""

    has_dependent_launch = True
    capability, sm_count, shared_bytes, l2_bytes = 90, 132, 227 * 1024, 50 << 20


def emulated_kernels(device: HostDevice, folds_routers: bool = True) -> CudaKernels:
    """A kernel factory for `load_gpu`."""
    launcher: Any = ModelLauncher(device)
    return CudaKernels(device, launcher, folds_routers=folds_routers, make_blas=lambda _: None)
