"""A model's part on one device: weights, cache, buffers, launches, and what they take.

`predict` states the need before anything is allocated; `DeviceModel` allocates it and compares. Its weights come last
(`upload`), so that kernels can be compiled meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from configs.progress import ProgressCallback
from worker.cuda.device import Device
from worker.cuda.gpu_step import BUCKETS, n_context_classes
from worker.cuda.kernel_set import KernelSet
from worker.cuda.kv_cache import DeviceKvCache, cache_bytes
from worker.cuda.lowering import Launch, Lowering, allocate_buffers, buffer_bytes
from worker.cuda.memory import (
    GRAPH_BYTES,
    MIB,
    DeviceMemory,
    DeviceNeed,
    aligned,
    check_fits,
    context_need_bytes,
)
from worker.cuda.passing import MOST_READERS as PASSING_READERS
from worker.cuda.passing import NOTHING, Passing, PassingWeights
from worker.cuda.sampling import STEPS_IN_FLIGHT, SamplingBuffers, SamplingLimits
from worker.cuda.step_inputs import DecodeInputs, InputLimits, PrefillInputs
from worker.cuda.values import Rows, RowTable
from worker.cuda.weights import PlacedWeights, part_bytes_for, passing_bytes, plan_weights, upload_bytes
from worker.model.gguf import ModelFile
from worker.ops.oplist import AttentionInts, OpKind, OpList

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


def passing_caches(oplist: OpList, passing: Passing) -> frozenset[int]:
    """Numbers of the cache's layers that only pass through."""
    attentions = [op for op in oplist.ops if op.kind == OpKind.ATTENTION and op.layer in passing.layers]
    return frozenset(AttentionInts(*op.ints).kv_layer for op in attentions)


def samples(oplist: OpList) -> bool:
    return any(op.kind == OpKind.SAMPLE for op in oplist.ops)


def predict(
    oplist: OpList,
    kernels: KernelSet,
    limits: StepLimits,
    kv_type: str,
    n_pages: int,
    context_bytes: int | None = None,
    passing: Passing = NOTHING,
) -> DeviceNeed:
    """Bytes by purpose, before anything is allocated. Raises EngineStartError for a type without kernels."""
    workspace = buffer_bytes(oplist, limits.max_tokens, limits.max_outputs)
    workspace += aligned(kernels.scratch_bytes(oplist, limits.max_tokens, limits.max_outputs))
    workspace += limits.prefill_inputs.total_bytes + limits.decode_inputs.total_bytes
    if samples(oplist):
        workspace += limits.sampling(oplist.n_vocab).total_bytes
    weights = plan_weights(oplist, kernels, passing)
    workspace += passing_bytes(oplist, weights)
    kv = cache_bytes(oplist.kv_layers, kv_type, n_pages, passing_caches(oplist, passing))
    raw = upload_bytes(oplist, weights, part_bytes_for(kv))
    return DeviceNeed(
        weights=aligned(weights.total_bytes),
        kv=kv,
        workspace=workspace,
        graphs=limits.n_graphs * GRAPH_BYTES,
        upload=raw if raw > kv else 0,  # else it goes where keys and values will be
        context=context_need_bytes(context_bytes),
    )


class DeviceModel:
    """Everything of one device; `upload` makes it ready. `sampling` is None where the head is elsewhere."""

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
        passing: Passing = NOTHING,
    ) -> None:
        self.device, self.oplist, self.limits = device, oplist, limits
        self.kernels = make_kernels(device)
        self.need = predict(oplist, self.kernels, limits, kv_type, n_pages, device.context_bytes, passing)
        check_fits(self.need, cap_bytes, device)
        self.memory = DeviceMemory(device, cap_bytes)
        part_bytes = part_bytes_for(self.need.kv)
        self._weights = PlacedWeights(file, oplist, self.kernels, self.memory, part_bytes, passing)
        self._paths = [str(path) for path in file.paths]
        self.passing: PassingWeights | None = None  # comes with the upload
        self.upload_s = 0.0
        caches = passing_caches(oplist, passing)
        self.cache = DeviceKvCache(self.memory, oplist.kv_layers, kv_type, n_pages, caches)
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
            oplist, self.kernels, self.buffers, self._weights.handles, self.cache, passing.layers
        ).launches()

    def upload(self, readers: int, progress: ProgressCallback) -> None:
        """Bring the weights to the device. Raises OSError when the file changes meanwhile."""
        started = time.monotonic()
        self.device.bind()
        with self._raw_buffers() as raw_address:
            self._weights.upload(raw_address, readers, progress)
        self.upload_s = time.monotonic() - started
        self.kernels.derive_weights()
        self.cache.clear()
        if parts := self._weights.passing_parts:
            raw_bytes = passing_bytes(self.oplist, self._weights.plan)
            raw_address = self.memory.take("workspace", raw_bytes)
            self.passing = PassingWeights(
                self.device, self._paths, parts, raw_address, min(readers, PASSING_READERS)
            )

    def table(self, index: int) -> RowTable:
        """Where rows of a weight of the op list are looked up."""
        return self._weights.handles.tables[index]

    def buffer(self, name: str) -> Rows:
        return self.buffers[self.oplist.buffer_index(name)]

    @contextlib.contextmanager
    def _raw_buffers(self) -> Iterator[int]:
        """Room for the upload: that of the cache, which is empty yet, unless it is too small."""
        if not self.need.upload:
            yield self.cache.address
            return
        with self.memory.borrow("upload", self.need.upload) as address:
            yield address

    def log_memory(self) -> None:
        """Compare what was predicted with what is taken now, after all kernels are there; where that is known."""
        own_bytes = self.device.own_bytes()
        if own_bytes is None:
            return
        level = logging.WARNING if own_bytes > self.need.total else logging.INFO
        words = "gpu%d (%s): predicted %.0f MiB, this process takes %.0f MiB"
        sizes = (self.need.total / MIB, own_bytes / MIB)
        logger.log(level, words, self.device.ordinal, self.device.name, *sizes)

    def memory_bytes(self) -> dict[str, int]:
        return dict(self.memory.taken)

    def close(self) -> None:
        if self.passing is not None:
            self.passing.close()
        self.decode_inputs.close()
        self.prefill_inputs.close()
        if self.sampling is not None:
            self.sampling.close()
        self.memory.close()
