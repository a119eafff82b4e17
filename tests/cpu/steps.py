"""Small steps for tests: one list of ops that both the C++ executor and the numpy reference run.

Inputs enter through EMBED: a table in F32 whose row i is what token i should bring into a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tests.cpu.quant_data import dequantize, random_weights
from worker.cpu.handles import KvCache, Step, Team
from worker.cpu.library import Library
from worker.cpu.lowered import lowered_structs
from worker.cpu.step_arrays import StepArrays
from worker.cpu.structs import KvType, WeightStruct
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.ops.oplist import Buffer, KvLayer, Op, OpKind, OpList, Weight
from worker.ops.reference import ReferenceExecutor

Float32Array = NDArray[np.float32]


@dataclass
class Case:
    """Ops, buffers and weights under construction."""

    library: Library
    rng: np.random.Generator
    ops: list[Op] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    structs: list[WeightStruct] = field(default_factory=list)
    values: list[Float32Array] = field(default_factory=list)
    kv_layers: list[KvLayer] = field(default_factory=list)
    n_vocab: int = 0
    kept: list[NDArray] = field(default_factory=list)

    def buffer(self, width: int, is_output: bool = False) -> int:
        name = "logits" if is_output and width == self.n_vocab else f"buffer {len(self.buffers)}"
        self.buffers.append(Buffer(name, width, is_output))
        return len(self.buffers) - 1

    def vector(self, values: Float32Array) -> int:
        values = np.ascontiguousarray(values, np.float32)
        self.values.append(values)
        self.structs.append(
            WeightStruct(type=0, rows=1, cols=values.size, experts=1, file=values.ctypes.data)
        )
        return len(self.structs) - 1

    def matrix(
        self, rows: int, cols: int, kind: Type = Type.F32, experts: int = 1, scale: float = 1.0
    ) -> int:
        """A packed matrix of random weights; a stack of them where experts > 1. F32 weights are scaled."""
        file = np.stack([random_weights(self.rng, kind, rows, cols) for _ in range(experts)])
        if kind == Type.F32:
            file = (file.view(np.float32) * np.float32(scale)).view(np.uint8)
        values = np.stack([dequantize(one, kind).reshape(rows, cols) for one in file])
        expert_bytes = self.library.packed_bytes(int(kind), rows, cols)
        packed = np.zeros((experts, expert_bytes + 64), np.uint8)
        start = -packed.ctypes.data % 64
        packed = packed.reshape(-1)[start : start + experts * expert_bytes].reshape(experts, expert_bytes)
        for one_file, one_packed in zip(file, packed, strict=True):
            self.library.pack(int(kind), rows, cols, one_file.ctypes.data, one_packed.ctypes.data)
        self.kept += [file, packed]
        self.values.append(values if experts > 1 else values[0])
        self.structs.append(
            WeightStruct(
                type=int(kind),
                rows=rows,
                cols=cols,
                experts=experts,
                packed=packed.ctypes.data,
                file=file.ctypes.data,
                packed_expert_bytes=expert_bytes,
                file_expert_bytes=file[0].nbytes,
            )
        )
        return len(self.structs) - 1

    def add(self, kind: OpKind, layer: int = 0, **operands: tuple) -> None:
        self.ops.append(Op(kind, layer, **operands))

    def given(self, rows: Float32Array) -> int:
        """A buffer that holds rows[token_ids]."""
        table = np.ascontiguousarray(rows, np.float32)
        self.values.append(table)
        self.structs.append(
            WeightStruct(type=0, rows=len(table), cols=table.shape[1], experts=1, file=table.ctypes.data)
        )
        buffer = self.buffer(table.shape[1])
        self.add(OpKind.EMBED, outputs=(buffer,), weights=(len(self.structs) - 1,), floats=(1.0,))
        return buffer

    def oplist(self) -> OpList:
        weights = tuple(Weight(str(index)) for index in range(len(self.values)))
        return OpList(tuple(self.ops), tuple(self.buffers), weights, tuple(self.kv_layers), self.n_vocab)

    def reference(self, n_pages: int = 1) -> ReferenceExecutor:
        return ReferenceExecutor(self.oplist(), lambda weight: self.values[int(weight.name)], n_pages)

    def kv(self, n_pages: int, kv_type: KvType = KvType.F16) -> KvCache:
        heads = [layer.n_kv_heads for layer in self.kv_layers]
        return self.library.kv_create(kv_type, heads, [layer.head_dim for layer in self.kv_layers], n_pages)

    def step(
        self, team: Team, kv: KvCache | None = None, max_tokens: int = 64, max_outputs: int = 64
    ) -> Step:
        ops, buffers = lowered_structs(self.oplist())
        return self.library.step_create(ops, self.structs, buffers, max_tokens, max_outputs, team, kv)


def batch_of(
    sequences: list[tuple[list[int], int, list[int]]], outputs: list[int] | None = None
) -> tuple[Batch, StepArrays]:
    """The same batch for both executors, from (token ids, first position, page ids) of each sequence.

    `outputs` are rows of the batch; all where it is None.
    """
    ids = [token for tokens, _, _ in sequences for token in tokens]
    positions = [first + i for tokens, first, _ in sequences for i in range(len(tokens))]
    bounds = np.cumsum([0, *[len(tokens) for tokens, _, _ in sequences]])
    most_pages = max(len(pages) for _, _, pages in sequences)
    tables = [[*pages, *[0] * (most_pages - len(pages))] for _, _, pages in sequences]
    rows = list(range(len(ids))) if outputs is None else outputs
    batch = Batch(
        np.asarray(ids, np.int32),
        np.asarray(positions, np.int32),
        np.asarray(bounds, np.int32),
        np.asarray(tables, np.int32),
        np.asarray(rows, np.int32),
    )
    return batch, native_batch(batch)


def native_batch(batch: Batch) -> StepArrays:
    n_tokens, n_sequences, n_outputs = len(batch.token_ids), len(batch.page_tables), len(batch.output_rows)
    native = StepArrays(n_tokens, n_sequences, max(n_outputs, 1), batch.page_tables.shape[1])
    native.struct.n_tokens, native.struct.n_sequences = n_tokens, n_sequences
    native.struct.n_outputs = n_outputs
    for name in ("token_ids", "positions", "sequence_first", "page_tables"):
        getattr(native, name)[:] = getattr(batch, name)
    native.output_rows[:n_outputs] = batch.output_rows
    return native


def pages_for(n_tokens: int, first_page: int = 0) -> list[int]:
    return list(range(first_page, first_page + (n_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS))
