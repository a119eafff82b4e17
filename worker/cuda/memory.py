"""Accounting of device memory: what was promised, what is taken, and for what.

A plan may use `cap_bytes` of a device. The executor predicts its needs before it allocates anything (`check_fits`)
and takes every byte through one `DeviceMemory`, which refuses what would go over the cap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from configs.errors import EngineStartError
from worker.cuda.device import ALIGNMENT_BYTES, Device

MIB = 1 << 20
# What is taken beside allocations. A context is measured when it is made (527 MiB on an H200 under driver 580); cuBLAS,
# kernels and streams come later (98 MiB there), hence the rest. Where a context was not measured: what an H200 takes.
LIBRARIES_BYTES = 112 * MIB
CONTEXT_BYTES = 640 * MIB
GRAPH_BYTES = 2 * MIB  # of a captured graph; 84 of them took 8 MiB together there


def context_need_bytes(measured_bytes: int | None) -> int:
    """The part of a device's memory that is not allocated by us."""
    return max(CONTEXT_BYTES, (measured_bytes or 0) + LIBRARIES_BYTES)


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes of one device that a placement takes, by purpose. `upload` is for the load only, before any graph."""

    weights: int
    kv: int
    workspace: int
    graphs: int
    upload: int = 0
    context: int = CONTEXT_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace + max(self.graphs, self.upload) + self.context


def check_fits(need: DeviceNeed, cap_bytes: int | None, device: Device) -> None:
    """Raises EngineStartError with both numbers when the need exceeds the plan's cap or what is free now."""
    free_bytes = device.free_bytes() + need.context  # the context is there already
    limits = [(free_bytes, "free")] + ([(cap_bytes, "allowed by --gpu-memory-mib")] if cap_bytes else [])
    limit_bytes, words = min(limits)
    if need.total <= limit_bytes:
        return
    parts = {"weights": need.weights, "KV cache": need.kv, "workspace": need.workspace, "graphs": need.graphs}
    parts |= {"upload": need.upload, "context": need.context}
    words_of_parts = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items() if size)
    raise EngineStartError(
        f"gpu{device.ordinal} ({device.name}) would need {need.total / MIB:,.0f} MiB: {words_of_parts}; "
        f"{limit_bytes / MIB:,.0f} MiB are {words}. Plan again: fewer layers will be placed there"
    )


class DeviceMemory:
    """All allocations of one executor on one device."""

    def __init__(self, device: Device, cap_bytes: int | None) -> None:
        self.device, self.cap_bytes = device, cap_bytes
        self._context_bytes = context_need_bytes(device.context_bytes)
        self.taken: dict[str, int] = {}
        self._addresses: list[int] = []

    @property
    def total_bytes(self) -> int:
        return sum(self.taken.values())

    def take(self, purpose: str, size_bytes: int, *, zeroed: bool = False) -> int:
        """Address of at least `size_bytes`. Raises EngineStartError beyond the cap or the device's memory."""
        size_bytes = max(aligned(size_bytes), ALIGNMENT_BYTES)
        if (
            self.cap_bytes is not None
            and self.total_bytes + self._context_bytes + size_bytes > self.cap_bytes
        ):
            raise EngineStartError(
                f"gpu{self.device.ordinal} ({self.device.name}): {size_bytes / MIB:,.0f} MiB more of {purpose} "
                f"would go over the cap of {self.cap_bytes / MIB:,.0f} MiB ({self.total_bytes / MIB:,.0f} MiB taken, "
                f"{self._context_bytes / MIB:,.0f} MiB are the driver's); plan again with this version"
            )
        address = self.device.allocate(size_bytes)
        self._addresses.append(address)
        self.taken[purpose] = self.taken.get(purpose, 0) + size_bytes
        if zeroed:
            self.device.fill_zero(address, size_bytes)
        return address

    @contextlib.contextmanager
    def borrow(self, purpose: str, size_bytes: int) -> Iterator[int]:
        """Memory for the time of a block."""
        address = self.take(purpose, size_bytes)
        try:
            yield address
        finally:
            self._addresses.remove(address)
            self.device.release(address)
            del self.taken[purpose]

    def close(self) -> None:
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            self.device.release(address)
        self.taken.clear()
