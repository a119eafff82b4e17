"""A model's part on one device, loaded and ready: weights, cache, buffers, launches, and what they take.

`predict` states the need before anything is allocated; `DeviceModel` allocates it and compares.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from worker.cuda.device import Device
from worker.cuda.gpu_step import BUCKETS, n_context_classes
from worker.cuda.kernel_set import KernelSet
from worker.cuda.kv_cache import DeviceKvCache, cache_bytes
from worker.cuda.lowering import Launch, Lowering, allocate_buffers, buffer_bytes
from worker.cuda.memory import GRAPH_BYTES, MIB, DeviceMemory, DeviceNeed, aligned, check_fits
from worker.cuda.sampling import STEPS_IN_FLIGHT, SamplingBuffers, SamplingLimits
from worker.cuda.step_inputs import DecodeInputs, InputLimits, PrefillInputs
from worker.cuda.upload import Progress
from worker.cuda.values import Rows
from worker.cuda.weights import load_weights, plan_weights
from worker.model.gguf import ModelFile
from worker.ops.oplist import OpKind, OpList

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLimits:
    """What steps may be as large as. `max_outputs` and `max_tokens` hold the padding of the largest bucket too."""

    max_tokens: int
    max_sequences: int
    max_outputs: int
    context_length_tokens: int
    max_pages: int  # of one sequence
    decode_bucket: int

    @property
    def prefill_inputs(self) -> InputLimits:
        return InputLimits(self.max_tokens, self.max_sequences, self.max_outputs, self.max_pages)

    @property
    def decode_inputs(self) -> InputLimits:
        return InputLimits(self.decode_bucket, self.decode_bucket, self.decode_bucket, self.max_pages)

    def sampling(self, n_vocab: int) -> SamplingLimits:
        return SamplingLimits(self.max_outputs, n_vocab, self.context_length_tokens)

    @property
    def n_graphs(self) -> int:
        """At most: buckets in use, greedy or not, in every class of contexts, for each block of inputs."""
        buckets = sum(size <= self.decode_bucket for size in BUCKETS)
        return STEPS_IN_FLIGHT * 2 * buckets * n_context_classes(self.context_length_tokens)


def samples(oplist: OpList) -> bool:
    return any(op.kind == OpKind.SAMPLE for op in oplist.ops)


def predict(oplist: OpList, kernels: KernelSet, limits: StepLimits, kv_type: str, n_pages: int) -> DeviceNeed:
    """Bytes by purpose, before anything is allocated. Raises EngineStartError for a type without kernels."""
    workspace = buffer_bytes(oplist, limits.max_tokens, limits.max_outputs)
    workspace += aligned(kernels.scratch_bytes(oplist, limits.max_tokens, limits.max_outputs))
    workspace += limits.prefill_inputs.total_bytes + limits.decode_inputs.total_bytes
    if samples(oplist):
        workspace += limits.sampling(oplist.n_vocab).total_bytes
    return DeviceNeed(
        weights=aligned(plan_weights(oplist, kernels).total_bytes),
        kv=cache_bytes(oplist.kv_layers, kv_type, n_pages),
        workspace=workspace,
        graphs=limits.n_graphs * GRAPH_BYTES,
    )


class DeviceModel:
    """Everything of one device. `sampling` is None where another device or the CPU has the head."""

    def __init__(
        self,
        device: Device,
        make_kernels: Callable[[Device], KernelSet],
        file: ModelFile,
        oplist: OpList,
        limits: StepLimits,
        kv_type: str,
        n_pages: int,
        cap_bytes: int | None,
        readers: int,
        progress: Progress,
    ) -> None:
        self.device, self.oplist, self.limits = device, oplist, limits
        self.kernels = make_kernels(device)
        self.need = predict(oplist, self.kernels, limits, kv_type, n_pages)
        check_fits(self.need, cap_bytes, device)
        free_before = device.free_bytes()
        self.memory = DeviceMemory(device, cap_bytes)
        started = time.monotonic()
        weights = load_weights(file, oplist, self.kernels, self.memory, readers, progress)
        self.upload_s = time.monotonic() - started
        self.cache = DeviceKvCache(self.memory, oplist.kv_layers, kv_type, n_pages)
        self.buffers = allocate_buffers(oplist, self.memory, limits.max_tokens, limits.max_outputs)
        self.sampling: SamplingBuffers | None = None
        if samples(oplist):
            self.sampling = SamplingBuffers(self.memory, limits.sampling(oplist.n_vocab))
        self.decode_inputs = DecodeInputs(self.memory, limits.decode_inputs, self.sampling)
        self.prefill_inputs = PrefillInputs(self.memory, limits.prefill_inputs, self.sampling)
        scratch_bytes = self.kernels.scratch_bytes(oplist, limits.max_tokens, limits.max_outputs)
        scratch = self.memory.take("workspace", scratch_bytes, zeroed=True)
        self.kernels.prepare(oplist, limits.max_tokens, limits.max_outputs, scratch, self.sampling)
        self.launches: tuple[Launch, ...] = Lowering(
            oplist, self.kernels, self.buffers, weights, self.cache
        ).launches()
        device.synchronize()
        self._log_memory(free_before)

    def buffer(self, name: str) -> Rows:
        return self.buffers[self.oplist.buffer_index(name)]

    def _log_memory(self, free_before: int) -> None:
        used = free_before - self.device.free_bytes()
        predicted = self.need.weights + self.need.kv + self.need.workspace
        logger.info(
            "gpu%d (%s): predicted %.0f MiB of weights, cache and workspace, took %.0f MiB; uploaded in %.2f s",
            *(self.device.ordinal, self.device.name, predicted / MIB, used / MIB, self.upload_s),
        )

    def memory_bytes(self) -> dict[str, int]:
        return dict(self.memory.taken)

    def close(self) -> None:
        self.decode_inputs.close()
        self.prefill_inputs.close()
        if self.sampling is not None:
            self.sampling.close()
        self.memory.close()
