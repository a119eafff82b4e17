"""Placement: where every unit lives and computes, and the settings of the runtime that go with it.

Frozen and complete: the worker needs a model path and one of these, nothing else. What the search varies is here;
what was measured is in the plan around it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LoadMode = Literal["mmap", "packed"]
KvType = Literal["f16", "q8_0"]

NATIVE = "native"  # the name of our own engine
PAGE_TOKENS = 32  # of the key/value cache, in every engine of ours (PW_PAGE_TOKENS of the kernels)


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Units whose name matches `units` (shell pattern) live in `tier` and compute on `device`. Last match wins."""

    units: str
    tier: str  # "ram", "nvme", "gpu0", ...
    device: str  # "cpu", "gpu0", ...


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`load_mode`: "mmap" computes from the mapped file, "packed" copies the weights into the kernels' layout."""

    engine: str  # NATIVE, "llama-server", or the name of a configured engine
    assignments: tuple[Assignment, ...]
    context_length_tokens: int  # of one sequence, prompt plus output
    max_sequences: int
    kv_type: KvType
    load_mode: LoadMode
    huge_pages: bool
    decode_threads: int
    prefill_threads: int
    ubatch_tokens: int  # most tokens in one step
    kv_budget_bytes: int
    cpus: tuple[int, ...] = ()  # threads are pinned to these; empty = not pinned
    spin_us: int = 2000  # how long an idle thread spins before it parks
    step_budget_ms: int = 150  # bound on a prefill chunk while other sequences decode
    passing_tokens: int = (
        0  # steps of at least so many compute the CPU's layers on a GPU, through which their weights pass
    )
    gpu_memory_mib: tuple[int, ...] = ()  # cap per GPU by number, never exceeded; missing ones have none

    def gpu_cap_bytes(self, ordinal: int) -> int | None:
        """What may be taken of a GPU in all; None = what is free there."""
        caps = self.gpu_memory_mib
        return caps[ordinal] << 20 if ordinal < len(caps) and caps[ordinal] > 0 else None

    @property
    def gpu_ordinals(self) -> tuple[int, ...]:
        """Numbers of the GPUs that compute anything, ascending."""
        devices = {assignment.device for assignment in self.assignments}
        return tuple(sorted(int(device[3:]) for device in devices if device.startswith("gpu")))


CPU_ONLY = (Assignment(units="*", tier="ram", device="cpu"),)
GPU_ONLY = (Assignment(units="*", tier="gpu0", device="gpu0"),)
