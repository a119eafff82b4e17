"""What the GPU part of the probe multiplies, without a GPU: every type and shape finds its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda.emulated_model import ShapesOnlyLauncher
from tests.cuda.host_device import HostDevice, view
from worker.cuda.driver import _NOTHING
from worker.probe import gpu_kernels


class CountingLauncher(ShapesOnlyLauncher):
    """Counts launches by source, as a recording launcher makes none."""

    is_recording = True

    def __init__(self) -> None:
        self.sources: list[str] = []

    def function(self, source: str, name: str, defines: Any = None) -> Any:
        self.sources.append(source)
        return _NOTHING

    def launch(self, *arguments: Any, **options: Any) -> None:
        """Nothing is launched."""


def allocate_nothing(sizes: list[int]) -> Callable[[int], int]:
    def allocate(size_bytes: int) -> int:
        sizes.append(size_bytes)
        return 256

    return allocate


@pytest.mark.parametrize("shape", gpu_kernels.SHAPES)
@pytest.mark.parametrize("name", gpu_kernels.KERNEL_TYPES)
def test_every_type_and_shape_has_decode_and_prefill_kernels(name: str, shape: tuple[int, int]) -> None:
    launcher, sizes = CountingLauncher(), []
    work = gpu_kernels._Work(launcher, name, shape, allocate_nothing(sizes))  # type: ignore[arg-type]
    assert sizes[0] >= gpu_kernels.DECODE_BYTES, "more than an L2 cache holds"
    work.decode()
    assert launcher.sources and set(launcher.sources) == {"gemv.cu"}
    assert len(launcher.sources) >= sizes[0] // (shape[0] * shape[1] * 4)
    launcher.sources.clear()
    work.prefill(object())  # type: ignore[arg-type]
    assert "gemv.cu" not in launcher.sources
    assert work.decode_file_bytes >= 0.9 * gpu_kernels.DECODE_BYTES


def test_memory_is_filled_to_its_end() -> None:
    device = HostDevice()
    size_bytes = (5 << 20) + 12345
    address = device.allocate(size_bytes)
    gpu_kernels.fill(device, address, size_bytes)  # type: ignore[arg-type]
    assert (view(address, (size_bytes,), "u1") == 0x2A).all()
    device.release(address)
    device.close()
