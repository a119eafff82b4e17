"""The real CUDA kernels behind the executor without a GPU: sources compiled for the host, memory of a HostDevice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda import emulate
from tests.cuda.emulator.device import EmulatedLauncher
from tests.cuda.host_device import HostDevice
from worker.cuda.cuda_kernels import CudaKernels

_MATRIX_STEMS = ("gemv", "moe_gate_up", "moe_down", "quantise", "repack", "halves", "group", "mma")
MATRIX_SOURCES = tuple(f"{stem}.cu" for stem in _MATRIX_STEMS)


class ModelLauncher:
    """Both emulators behind one launcher; launches are queued on the host device, so graphs record them."""

    has_dependent_launch = False
    capability, sm_count, shared_bytes, l2_bytes = 75, 3, 99 * 1024, 1 << 20

    def __init__(self, device: HostDevice, folder: Path) -> None:
        self._device = device
        self._launchers = {True: emulate.EmulatedLauncher(), False: EmulatedLauncher(folder)}
        self._of_function: dict[int, Any] = {}
        self._functions: dict[str, Any] = {}
        self.n_launches = 0

    def function(self, source: str, name: str, defines: Mapping[str, int | float | str] | None = None) -> Any:
        key = repr((source, name, sorted((defines or {}).items())))
        if key not in self._functions:
            launcher = self._launchers[source in MATRIX_SOURCES]
            function = launcher.function(source, name, defines)
            self._functions[key] = function
            self._of_function[id(function)] = launcher
        return self._functions[key]

    def launch(
        self,
        function: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int,
        args: tuple[Any, ...],
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        self.n_launches += 1
        launcher = self._of_function[id(function)]
        self._device.submit(
            function.name, lambda: launcher.launch(function, grid, block, shared_bytes, args, pdl, cluster)
        )


def emulated_kernels(folder: Path) -> Any:
    """A kernel factory for `load_gpu`."""

    def make(device: HostDevice) -> CudaKernels:
        return CudaKernels(device, ModelLauncher(device, folder), make_blas=lambda _: None)  # type: ignore[arg-type]

    return make
