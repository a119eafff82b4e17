"""Layers of the CPU whose larger steps a GPU computes: their weights and pages of their cache pass through it.

A prompt asks so much arithmetic of each weight that bringing it over the link costs less than computing on the CPU.
Keys and values stay where decoding wants them: pages of earlier tokens come along, those that were written go back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.cuda.kv_cache import KvLayerArrays
from worker.cuda.kv_pages import HostLayer, PageList
from worker.cuda.lowering import Launch
from worker.cuda.model import DeviceModel
from worker.cuda.step_inputs import PrefillInputs
from worker.cuda.values import RowTable, StepShape
from worker.model.gguf import ModelFile
from worker.ops.batch import PAGE_TOKENS
from worker.ops.oplist import AttentionInts, Op, OpKind
from worker.ops.sections import RESIDUAL
from worker.runtime.executor import CancelFlag, SampledToken, StepBatch, StepCancelled
from worker.runtime.gpu_batch import PreparedStep
from worker.runtime.gpu_sections import CpuSection, localised, own_block


@dataclass(frozen=True)
class _Layer:
    """One layer's launches, its place in the device's cache and its pages in the CPU's."""

    number: int
    launches: tuple[Launch, ...]
    arrays: KvLayerArrays
    host: HostLayer


def can_pass(ops: tuple[Op, ...]) -> bool:
    """Whether a section is layers, with or without the embedding: what comes after them is for few rows."""
    return any(op.layer >= 0 for op in ops) and all(op.layer >= 0 or op.kind == OpKind.EMBED for op in ops)


class PassingSection(CpuSection):
    """A CpuSection whose steps of `fewest_tokens` or more run as launches [begin, end) of a device's model."""

    def __init__(
        self, cpu: CpuSection, model: DeviceModel, file: ModelFile, begin: int, end: int, fewest_tokens: int
    ) -> None:
        super().__init__(cpu.executor, cpu.residual, cpu.receives, cpu.sends)
        self.model, self._fewest_tokens = model, fewest_tokens
        ops, launches = model.oplist.ops[begin:end], model.launches[begin:end]
        self._layers = tuple(self._layer(number, ops, launches) for number in _layer_numbers(ops))
        self._embedding = None
        if ops[0].kind == OpKind.EMBED:
            self._embedding = _Embedding(model, file, ops[0], launches[0])
        self._pages = _Pages(model)

    def _layer(self, number: int, ops: tuple[Op, ...], launches: tuple[Launch, ...]) -> _Layer:
        ints, own, cache = (
            _attention(ops, number),
            _attention(self.executor.oplist.ops, number),
            self.executor.kv,
        )
        assert cache is not None
        host = HostLayer(*cache.layer_memory(own.kv_layer), ints.n_kv_heads, ints.head_dim)
        self.model.device.pin(host.address, host.size_bytes)
        own_launches = tuple(launch for launch in launches if launch.layer == number)
        return _Layer(number, own_launches, self.model.cache.layers[ints.kv_layer], host)

    def run(self, prepared: PreparedStep, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken] | None:
        """Raises StepCancelled, EngineError when weights can not be brought any more."""
        if batch.is_decode or batch.n_tokens < self._fewest_tokens:
            return super().run(prepared, batch, cancel)
        self.counters.eager_steps += 1
        device, passing = self.model.device, self.model.passing
        assert passing is not None
        device.bind()
        if self._layers[0].number == passing.first_layer:
            passing.rewind()
        shape = self._begin(prepared, batch)
        for layer in self._layers:
            if cancel.is_set():
                device.synchronize()
                raise StepCancelled("the step was cancelled")
            passing.bring(layer.number)
            self._enqueue(layer, shape)
        residual, size_bytes = self.model.buffer(RESIDUAL).values, batch.n_tokens * self.residual.row_bytes
        if self.sends:
            device.copy_out(self.residual.address, residual, size_bytes)
        device.synchronize()
        return None

    def _begin(self, prepared: PreparedStep, batch: StepBatch) -> StepShape:
        """Queue what the layers read: metadata, the residual or the embedding's rows."""
        device, block = self.model.device, own_block(self.model, prepared)
        assert isinstance(block, PrefillInputs)
        shape = localised(self.model, prepared)
        self._pages.list(batch)
        if self._embedding is not None:
            block.token_ids[: batch.n_tokens] = np.arange(batch.n_tokens)  # rows are in the order of tokens
        block.upload(shape.n_sequences)
        if self._embedding is not None:
            self._embedding.enqueue(batch, shape)
        elif self.receives:
            residual, size_bytes = (
                self.model.buffer(RESIDUAL).values,
                batch.n_tokens * self.residual.row_bytes,
            )
            device.copy_in(residual, self.residual.address, size_bytes)
        return shape

    def _enqueue(self, layer: _Layer, shape: StepShape) -> None:
        kernels, pages = self.model.kernels, self._pages
        kernels.move_pages(layer.host, layer.arrays, pages.earlier, "device")
        for launch in layer.launches:
            launch.enqueue(shape)
        kernels.move_pages(layer.host, layer.arrays, pages.written, "host")

    def close(self) -> None:
        device = self.model.device
        device.bind()
        device.synchronize()
        for layer in self._layers:
            device.unpin(layer.host.address)
        self._pages.close()
        if self._embedding is not None:
            self._embedding.close()
        super().close()


def _attention(ops: tuple[Op, ...], layer: int) -> AttentionInts:
    """The attention of one layer."""
    (op,) = (op for op in ops if op.layer == layer and op.kind == OpKind.ATTENTION)
    return AttentionInts(*op.ints)


def _layer_numbers(ops: tuple[Op, ...]) -> list[int]:
    return list(dict.fromkeys(op.layer for op in ops if op.layer >= 0))


class _Pages:
    """Which pages of a step hold `earlier` tokens, and which are `written`: ids in pinned memory."""

    def __init__(self, model: DeviceModel) -> None:
        self._most = model.limits.max_sequences * model.limits.max_pages
        self._host = model.device.host_buffer(2 * 4 * self._most)
        self._ids = self._host.array.view(np.int32).reshape(2, self._most)
        self.earlier = self.written = PageList(self._host.address, 0)

    def list(self, batch: StepBatch) -> None:
        earlier: list[int] = []
        written: list[int] = []
        for part in batch.parts:
            first, end = part.first_position, part.first_position + len(part.token_ids)
            earlier += part.page_ids[: -(-first // PAGE_TOKENS)]
            written += part.page_ids[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
        self._ids[0, : len(earlier)], self._ids[1, : len(written)] = earlier, written
        self.earlier = PageList(self._host.address, len(earlier))
        self.written = PageList(self._host.address + 4 * self._most, len(written))

    def close(self) -> None:
        self._host.close()


class _Embedding:
    """Rows of the table in RAM, gathered for one step; the device's table has room for these alone."""

    def __init__(self, model: DeviceModel, file: ModelFile, op: Op, launch: Launch) -> None:
        self._device, self._launch = model.device, launch
        self._table: RowTable = model.table(op.weights[0])
        tensor = model.oplist.weights[op.weights[0]].tensor
        assert tensor is not None
        stored = np.frombuffer(file.tensor_bytes(tensor.name), np.uint8)
        self._stored = stored.reshape(tensor.rows, self._table.row_bytes)
        self._host = self._device.host_buffer(model.limits.max_tokens * self._table.row_bytes)
        self._rows = self._host.array.reshape(-1, self._table.row_bytes)

    def enqueue(self, batch: StepBatch, shape: StepShape) -> None:
        ids = np.concatenate([np.asarray(part.token_ids, np.int64) for part in batch.parts])
        np.take(self._stored, ids, axis=0, out=self._rows[: len(ids)])
        self._device.copy_in(self._table.address, self._host.address, len(ids) * self._table.row_bytes)
        self._launch.enqueue(shape)

    def close(self) -> None:
        self._host.close()
