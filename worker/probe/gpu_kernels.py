"""Decode and prefill rates of the GPU's matrix kernels, per weight type, with weights beyond the L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from plans.machine import GpuKernelRate
from worker.cuda.blas import CuBlas
from worker.cuda.device import CudaDevice
from worker.cuda.driver import Launcher
from worker.cuda.formats import SUPPORTED, GpuMatrix, planar_row_bytes, type_id_of
from worker.cuda.linear import linear, linear_workspace_bytes
from worker.cuda.matmul import Activations, Part
from worker.model.types import BY_NAME

KERNEL_TYPES = SUPPORTED
ROWS, COLUMNS = 4096, 4096
N_MATRICES = 16  # of one decode graph; 150 MB and more
PREFILL_TOKENS = 512
# A byte that makes ordinary numbers in every format: f16 0x2a2a is 0.05.
_FILL = 0x2A


def measure_kernel(device: CudaDevice, launcher: Launcher, type_name: str) -> GpuKernelRate:
    """Rates of one type; raises what the device or the compiler raises."""
    bench = _TypeBench(device, launcher, type_name)
    try:
        return GpuKernelRate(type_name, round(bench.decode_bytes_per_s()), round(bench.prefill_macs_per_s()))
    finally:
        bench.close()


class _TypeBench:
    def __init__(self, device: CudaDevice, launcher: Launcher, type_name: str) -> None:
        self._device, self._launcher = device, launcher
        type_id = type_id_of(type_name)
        self._file_bytes = BY_NAME[type_name].row_bytes(COLUMNS) * ROWS
        matrix_bytes = planar_row_bytes(type_id, COLUMNS) * ROWS
        self._addresses: list[int] = []
        stack = self._filled(matrix_bytes * N_MATRICES)
        self._matrices = [
            GpuMatrix(type_id, ROWS, COLUMNS, stack + index * matrix_bytes) for index in range(N_MATRICES)
        ]
        values = self._filled(4 * PREFILL_TOKENS * COLUMNS)
        codes = self._filled(PREFILL_TOKENS * COLUMNS)
        scales = self._filled(8 * PREFILL_TOKENS * COLUMNS // 32)
        self._source = Activations(values, codes, scales, scales + 4 * PREFILL_TOKENS * COLUMNS // 32)
        self._output = self._filled(4 * PREFILL_TOKENS * ROWS)
        part = Part(self._matrices[0], self._output, ROWS)
        self._workspace = self._filled(linear_workspace_bytes([part], PREFILL_TOKENS))

    def _filled(self, size_bytes: int) -> int:
        address = self._device.allocate(size_bytes)
        self._addresses.append(address)
        block = np.full(min(size_bytes, 16 << 20), _FILL, np.uint8)
        for begin in range(0, size_bytes, block.nbytes):
            count = min(block.nbytes, size_bytes - begin)
            self._device.copy_in(address + begin, block.ctypes.data, count)
        self._device.synchronize()
        return address

    def _seconds(self, work: Callable[[], None]) -> float:
        work()
        self._device.synchronize()
        graph = self._device.capture(work)
        times = []
        for _ in range(8):
            started_s = time.perf_counter()
            graph.launch()
            self._device.synchronize()
            times.append(time.perf_counter() - started_s)
        return min(times)

    def decode_bytes_per_s(self) -> float:
        def work() -> None:
            for matrix in self._matrices:
                linear(self._launcher, [Part(matrix, self._output, ROWS)], self._source, 1)

        return self._file_bytes * N_MATRICES / self._seconds(work)

    def prefill_macs_per_s(self) -> float:
        blas = CuBlas(self._device.stream)

        def work() -> None:
            for matrix in self._matrices[:4]:
                part = Part(matrix, self._output, ROWS)
                linear(
                    self._launcher,
                    [part],
                    self._source,
                    PREFILL_TOKENS,
                    blas=blas,
                    workspace=self._workspace,
                )

        work()
        self._device.synchronize()
        times = []
        for _ in range(4):
            started_s = time.perf_counter()
            work()
            self._device.synchronize()
            times.append(time.perf_counter() - started_s)
        blas.close()
        return 4 * PREFILL_TOKENS * ROWS * COLUMNS / min(times)

    def close(self) -> None:
        for address in self._addresses:
            self._device.release(address)
