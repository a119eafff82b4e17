"""Decode and prefill rates of the GPU's matrix kernels, per weight type and shape, with weights beyond the L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from plans.machine import GpuKernelRate
from worker.cpu.matrix import FILL_BYTE
from worker.cuda.blas import CuBlas
from worker.cuda.device import CudaDevice
from worker.cuda.driver import Launcher
from worker.cuda.formats import SUPPORTED, GpuMatrix, planar_row_bytes, type_id_of
from worker.cuda.linear import linear, linear_workspace_bytes
from worker.cuda.matmul import Activations, Part
from worker.cuda.prefill import Blas
from worker.model.types import BY_NAME

KERNEL_TYPES = SUPPORTED
SHAPES = ((4096, 4096), (768, 2048))  # rows, columns: of a dense layer, and of an expert
DECODE_BYTES = 160 << 20  # weights of one decode graph, together
PREFILL_TOKENS, PREFILL_MATRICES = 512, 4

Allocate = Callable[[int], int]


def compile_kernels(device: CudaDevice, launcher: Launcher) -> None:
    """Begin to compile, side by side, what `measure_kernel` will run."""
    blas = CuBlas(device.stream)
    with launcher.only_recording():
        for name in KERNEL_TYPES:
            for shape in SHAPES:
                work = _Work(launcher, name, shape, lambda _: 256)
                work.decode()
                work.prefill(blas)
    blas.close()


def measure_kernel(
    device: CudaDevice, launcher: Launcher, type_name: str, shape: tuple[int, int]
) -> GpuKernelRate:
    """Rates of one type at one shape (rows, columns); raises what the device or the compiler raises."""
    addresses: list[int] = []

    def filled(size_bytes: int) -> int:
        addresses.append(device.allocate(size_bytes))
        fill(device, addresses[-1], size_bytes)
        return addresses[-1]

    blas = CuBlas(device.stream)
    try:
        work = _Work(launcher, type_name, shape, filled)
        decode_s = _fastest_s(device, work.decode, as_graph=True)
        prefill_s = _fastest_s(device, lambda: work.prefill(blas), as_graph=False)
        rows, columns = shape
        return GpuKernelRate(
            type_name,
            round(work.decode_file_bytes / decode_s),
            round(work.prefill_macs / prefill_s),
            rows=rows,
            columns=columns,
        )
    finally:
        blas.close()
        for address in addresses:
            device.release(address)


def fill(device: CudaDevice, address: int, size_bytes: int) -> None:
    """One block from the host, doubled on the device until all is full."""
    block = np.full(min(size_bytes, 1 << 20), FILL_BYTE, np.uint8)
    device.copy_in(address, block.ctypes.data, block.nbytes)
    done = block.nbytes
    while done < size_bytes:
        count = min(done, size_bytes - done)
        device.copy_within(address + done, address, count)
        done += count
    device.synchronize()


class _Work:
    """Matrices of one type and shape with their inputs and outputs, and the products to be timed."""

    def __init__(
        self, launcher: Launcher, type_name: str, shape: tuple[int, int], allocate: Allocate
    ) -> None:
        self._launcher, (rows, columns) = launcher, shape
        type_id = type_id_of(type_name)
        matrix_bytes = planar_row_bytes(type_id, columns) * rows
        n_matrices = max(PREFILL_MATRICES, -(-DECODE_BYTES // matrix_bytes))
        stack = allocate(matrix_bytes * n_matrices)
        matrices = [GpuMatrix(type_id, rows, columns, stack + i * matrix_bytes) for i in range(n_matrices)]
        n_values = PREFILL_TOKENS * columns
        scales = allocate(8 * n_values // 32)
        self._source = Activations(
            allocate(4 * n_values), allocate(n_values), scales, scales + 4 * n_values // 32
        )
        output = allocate(4 * PREFILL_TOKENS * rows)
        self._parts = [Part(matrix, output, rows) for matrix in matrices]
        self._workspace = allocate(linear_workspace_bytes(self._parts[:1], PREFILL_TOKENS))
        self.decode_file_bytes = BY_NAME[type_name].row_bytes(columns) * rows * n_matrices
        self.prefill_macs = PREFILL_MATRICES * n_values * rows

    def decode(self) -> None:
        for part in self._parts:
            linear(self._launcher, [part], self._source, 1)

    def prefill(self, blas: Blas) -> None:
        for part in self._parts[:PREFILL_MATRICES]:
            linear(self._launcher, [part], self._source, PREFILL_TOKENS, blas=blas, workspace=self._workspace)


def _fastest_s(device: CudaDevice, work: Callable[[], None], as_graph: bool) -> float:
    """Seconds of the fastest of several runs, replayed from a graph where it can be captured (cuBLAS cannot)."""
    work()
    device.synchronize()
    run = device.capture(work).launch if as_graph else work
    times = []
    for _ in range(6):
        started_s = time.perf_counter()
        run()
        device.synchronize()
        times.append(time.perf_counter() - started_s)
    return min(times)
