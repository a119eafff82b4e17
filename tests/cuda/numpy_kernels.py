"""Kernels in numpy behind the kernel seam, on a HostDevice: f32 through the reference's functions, so that everything
above the seam (lowering, inputs, graphs, upload, executor) can be compared with the reference executor exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.cuda.host_device import HostDevice, copy, view
from tests.cuda.host_matrix import HostMatrix
from worker.cuda.device import Device
from worker.cuda.kernel_set import KernelSet
from worker.cuda.kv_cache import KvLayerArrays
from worker.cuda.kv_pages import HostLayer, PageList, Side
from worker.cuda.sampler import SAMPLED, SAMPLER
from worker.cuda.sampling import SamplingBuffers
from worker.cuda.values import Rows, RowTable, StepShape
from worker.model.quants import dequantize
from worker.model.types import BY_ID
from worker.ops import reference
from worker.ops.batch import PAGE_TOKENS
from worker.ops.oplist import AttentionInts, OpList, RopeStoreInts, RouterInts


class NumpyKernels(KernelSet):
    """KernelSet on a HostDevice. `calls` lists (op, numbers of the shape) in order, for asserting on the lowering."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.calls: list[tuple[Any, ...]] = []
        self.sampling: SamplingBuffers | None = None

    def _submit(self, call: tuple[Any, ...], work: Callable[[], None]) -> None:
        self.calls.append(call)
        self.device.submit(call[0], work)

    def row_bytes(self, type_id: int, columns: int) -> int:
        return 4 * columns

    def lay_out(self, type_id: int, n_rows: int, columns: int, raw: int, target: int) -> None:
        kind = BY_ID[type_id]

        def work() -> None:
            stored = view(raw, (n_rows * kind.row_bytes(columns),), np.uint8)
            view(target, (n_rows, columns))[:] = dequantize(kind.name, stored, (columns, n_rows)).reshape(
                n_rows, columns
            )

        self._submit(("lay_out", type_id, n_rows, columns), work)

    def matrix(self, type_id: int, rows: int, columns: int, experts: int, address: int) -> HostMatrix:
        return HostMatrix(rows, columns, experts, address)

    def compile_ahead(self, enqueue: Callable[[], None]) -> None:
        """Nothing is compiled here."""

    def load_compiled(self) -> None:
        """As `compile_ahead`."""

    def scratch_bytes(self, oplist: OpList, max_tokens: int, max_outputs: int) -> int:
        return 1024

    def prepare(
        self,
        oplist: OpList,
        max_tokens: int,
        max_outputs: int,
        scratch: int,
        sampling: SamplingBuffers | None,
    ) -> None:
        self.sampling = sampling

    def receive(self, shape: StepShape) -> None:
        inputs, box = shape.inputs, shape.mailbox

        def work() -> None:
            n_bytes = shape.n_outputs * SAMPLER.itemsize if shape.sampling == "full" else 0
            copy(inputs.samplers, box.samplers, n_bytes)
            for row, (token, position, index, page) in enumerate(
                view(box.rows, (shape.n_sequences, 4), np.int32)
            ):
                view(inputs.positions, (row + 1,), np.int32)[row] = position
                if token >= 0:
                    view(inputs.token_ids, (row + 1,), np.int32)[row] = token
                if index >= 0:
                    at = row * inputs.max_pages + index
                    view(inputs.page_tables, (at + 1,), np.int32)[at] = page

        self._submit(("receive", shape.n_sequences), work)

    def send(self, shape: StepShape) -> None:
        box = shape.mailbox
        if shape.sampling == "none":
            return
        assert self.sampling is not None
        name, size = ("tokens", 4) if shape.sampling == "greedy" else ("sampled", SAMPLED.itemsize)
        source, target = self.sampling.address_of[name], getattr(box, name)
        self._submit(("send", shape.n_outputs), lambda: copy(target, source, size * shape.n_outputs))

    def embed(self, shape: StepShape, table: RowTable, out: Rows, scale: float) -> None:
        def work() -> None:
            ids = view(shape.inputs.token_ids, (shape.n_tokens,), np.int32)
            kind = BY_ID[table.type_id]
            for row, token in enumerate(ids):
                stored = view(
                    table.address + int(token) * table.row_bytes, (kind.row_bytes(table.columns),), np.uint8
                )
                values = dequantize(kind.name, stored, (table.columns,)).reshape(-1)
                _rows(out, shape.n_tokens)[row] = values * np.float32(scale)

        self._submit(("embed", shape.n_tokens, table.columns), work)

    def rms_norm(
        self, rows: int, source: Rows, weight: int, out: Rows, eps: float, add: bool, shape: StepShape
    ) -> None:
        def work() -> None:
            normed = reference.rms_norm(_rows(source, rows), view(weight, (source.width,)), eps)
            target = _rows(out, rows)
            target[:] = target + normed if add else normed

        self._submit(("rms_norm", rows, source.width, add), work)

    def linear(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[HostMatrix, ...],
        outs: tuple[Rows, ...],
        biases: tuple[int, ...],
        accumulate: bool,
        scale: float,
        softcap: float,
        shape: StepShape,
    ) -> None:
        def work() -> None:
            for matrix, out, bias in zip(matrices, outs, biases, strict=True):
                product = (_rows(source, rows) @ matrix.values().T) * np.float32(scale)
                product = product + view(bias, (matrix.rows,)) if bias else product
                product = softcap * np.tanh(product / softcap) if softcap else product
                target = _rows(out, rows)
                target[:] = target + product if accumulate else product

        self._submit(("linear", rows, source.width, tuple(m.rows for m in matrices), accumulate), work)

    def rope_store(
        self,
        shape: StepShape,
        query: Rows,
        key: Rows,
        value: Rows,
        q_norm: int,
        k_norm: int,
        frequencies: int,
        ints: RopeStoreInts,
        floats: tuple[float, ...],
        cache: KvLayerArrays,
    ) -> None:
        heads, kv_heads, head_dim, rope_dim, style, _ = ints
        eps, magnitude = floats

        def turned(rows: Rows, n_heads: int, norm: int) -> NDArray[np.float32]:
            x = _rows(rows, shape.n_tokens).reshape(-1, n_heads, head_dim)
            x = reference.rms_norm(x, view(norm, (head_dim,)), eps) if norm else x
            positions = view(shape.inputs.positions, (shape.n_tokens,), np.int32)
            return reference.rotate(x, positions, view(frequencies, (rope_dim // 2,)), style, magnitude)

        def work() -> None:
            _rows(query, shape.n_tokens)[:] = turned(query, heads, q_norm).reshape(shape.n_tokens, -1)
            keys = turned(key, kv_heads, k_norm)
            values = _rows(value, shape.n_tokens).reshape(-1, kv_heads, head_dim)
            for row, (page, slot) in enumerate(_slots(shape)):
                _page(cache.keys, page, kv_heads, head_dim)[:, slot] = keys[row]
                _page(cache.values, page, kv_heads, head_dim)[:, slot] = values[row]

        self._submit(("rope_store", shape.n_tokens, heads, kv_heads, head_dim), work)

    def attention(
        self,
        shape: StepShape,
        query: Rows,
        out: Rows,
        ints: AttentionInts,
        floats: tuple[float, ...],
        cache: KvLayerArrays,
    ) -> None:
        heads, kv_heads, head_dim, window = ints.n_heads, ints.n_kv_heads, ints.head_dim, ints.window_tokens

        def work() -> None:
            positions = view(shape.inputs.positions, (shape.n_tokens,), np.int32)
            for row, position in enumerate(positions):
                past = np.arange(position + 1)
                keys, values = _past(shape, row, past, cache, kv_heads, head_dim)
                visible = (past > position - window if window else past >= 0)[None]
                q = _rows(query, shape.n_tokens)[row].reshape(1, heads, head_dim)
                _rows(out, shape.n_tokens)[row] = reference.attend(q, keys, values, visible, *floats).reshape(
                    -1
                )

        self._submit(("attention", shape.n_tokens, shape.context_limit, shape.n_tiles > 0, window), work)

    def glu(self, rows: int, gate: Rows, up: Rows, out: Rows, activation: int, shape: StepShape) -> None:
        def work() -> None:
            _rows(out, rows)[:] = reference.activate(_rows(gate, rows), activation) * _rows(up, rows)

        self._submit(("glu", rows, gate.width), work)

    def router(
        self,
        shape: StepShape,
        source: Rows,
        matrix: HostMatrix,
        bias: int,
        ids: Rows,
        weights: Rows,
        ints: RouterInts,
        scale: float,
    ) -> None:
        n_experts, used, gating, normalize = ints

        def work() -> None:
            logits = _rows(source, shape.n_tokens) @ matrix.values().T
            offsets = view(bias, (n_experts,)) if bias else None
            chosen, shares = reference.choose_experts(logits, offsets, used, gating, bool(normalize), scale)
            _rows(ids, shape.n_tokens)[:] = chosen.view(np.float32)
            _rows(weights, shape.n_tokens)[:] = shares

        self._submit(("router", shape.n_tokens, n_experts, used), work)

    def moe(
        self,
        shape: StepShape,
        source: Rows,
        ids: Rows,
        weights: Rows,
        stacks: tuple[HostMatrix, HostMatrix, HostMatrix],
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None:
        def work() -> None:
            gate, up, down = (stack.values() for stack in stacks)
            n_tokens, target = shape.n_tokens, _rows(out, shape.n_tokens)
            if not accumulate:
                target[:] = 0
            for row, experts in enumerate(_rows(ids, n_tokens).view(np.int32)):
                x = _rows(source, n_tokens)[row]
                for slot, expert in enumerate(experts):
                    hidden = reference.activate(gate[expert] @ x, activation) * (up[expert] @ x)
                    target[row] += _rows(weights, n_tokens)[row, slot] * (down[expert] @ hidden)

        self._submit(("moe", shape.n_tokens, stacks[0].experts, ids.width), work)

    def move_pages(self, host: HostLayer, layer: KvLayerArrays, pages: PageList, to: Side) -> None:
        """f16 alone: the CPU has keys as [head_dim, PAGE_TOKENS], and both of a head's page in one block."""
        heads, dim = host.n_kv_heads, host.head_dim

        def work() -> None:
            for page in view(pages.address, (pages.count,), np.int32).tolist():
                for head in range(heads):
                    block = host.address + head * host.head_bytes + page * 4 * PAGE_TOKENS * dim
                    keys = view(block, (dim, PAGE_TOKENS), np.float16).T
                    values = view(block + 2 * PAGE_TOKENS * dim, (PAGE_TOKENS, dim), np.float16)
                    for far, base in ((keys, layer.keys), (values, layer.values)):
                        near = _page(base, page, heads, dim)[head]
                        (far if to == "host" else near)[:] = near if to == "host" else far

        self._submit(("move_pages", pages.count, to), work)

    def fold_router(self, *_: object) -> None:
        return None

    def derive_weights(self) -> None:
        """No router was folded."""

    def routed_linear(self, *_: object) -> None:
        raise AssertionError("no router was folded")

    def takes_network(self, rows: int, matrices: tuple[HostMatrix, ...]) -> bool:
        return False

    def network(self, *_: object) -> None:
        raise AssertionError("no network is taken")

    def select(self, shape: StepShape, source: Rows, out: Rows) -> None:
        def work() -> None:
            rows = view(shape.inputs.output_rows, (shape.n_outputs,), np.int32)
            _rows(out, len(rows))[:] = _rows(source, shape.n_tokens)[rows]

        assert shape.n_outputs, "a device refuses a grid of no blocks"
        self._submit(("select", shape.n_outputs), work)

    def sample(self, shape: StepShape, logits: Rows, n_vocab: int) -> None:
        if shape.sampling == "none":
            return

        def work() -> None:
            assert self.sampling is not None
            rows = _rows(logits, shape.n_outputs)
            places = self.sampling.address_of
            if shape.sampling == "greedy":
                view(places["tokens"], (shape.n_outputs,), np.int32)[:] = rows.argmax(axis=1)
                return
            answers = view(places["sampled"], (shape.n_outputs * SAMPLED.itemsize,), np.uint8).view(SAMPLED)
            samplers = self._samplers(shape)
            for row, sampler in enumerate(samplers):
                first = shape.mailbox.history + 4 * int(sampler["first_history"])
                history = view(first, (int(sampler["n_history"]),), np.int32)
                drawn = view(places["tokens"], (row + 1,), np.int32)[row]
                _choose(answers[row], rows[row], sampler, np.where(history < 0, drawn, history))
            view(places["tokens"], (shape.n_outputs,), np.int32)[:] = answers["token"]

        self._submit(("sample", shape.sampling, shape.n_outputs, n_vocab), work)

    def _samplers(self, shape: StepShape) -> NDArray[Any]:
        size = shape.n_outputs * SAMPLER.itemsize
        return view(shape.inputs.samplers, (size,), np.uint8).view(SAMPLER)


def numpy_kernels(device: Device) -> NumpyKernels:
    """A kernel factory for `load_gpu`."""
    assert isinstance(device, HostDevice)
    return NumpyKernels(device)


def _choose(
    answer: np.void, logits: NDArray[np.float32], sampler: np.void, history: NDArray[np.int32]
) -> None:
    """The largest logit or the target, with log probabilities; biases, penalties and chance are the real kernel's. With
    a temperature one of the five largest, by all that chance and penalties of the real one depend on.
    """
    token = int(sampler["target"]) if sampler["target"] >= 0 else int(logits.argmax())
    if sampler["target"] < 0 and sampler["temperature"] > 0:
        mixed = int(sampler["seed"]) * 31 + int(sampler["draw"]) * 7 + int((history * 3 + 1).sum())
        token = int(np.argsort(-logits, kind="stable")[mixed % 5])
    logprobs = logits - (logits.max() + np.log(np.exp(logits - logits.max(), dtype=np.float64).sum()))
    n_top = int(sampler["n_top"])
    answer["token"], answer["status"], answer["n_top"] = token, 0, max(0, n_top)
    answer["logprob"] = logprobs[token]
    best = np.argsort(-logits, kind="stable")[: max(0, n_top)]
    answer["top_ids"][: len(best)] = best
    answer["top_logprobs"][: len(best)] = logprobs[best]


def _rows(rows: Rows, count: int) -> NDArray[np.float32]:
    return view(rows.values, (count, rows.width))


def _page(base: int, page: int, kv_heads: int, head_dim: int) -> NDArray[np.float16]:
    """f16 [kv_heads, PAGE_TOKENS, head_dim]"""
    values = kv_heads * PAGE_TOKENS * head_dim
    return view(base + 2 * values * page, (kv_heads, PAGE_TOKENS, head_dim), np.float16)


def _page_of(shape: StepShape, row: int, position: int) -> int:
    sequence = int(view(shape.inputs.sequence_of_token, (shape.n_tokens,), np.int32)[row])
    at = shape.inputs.page_tables + 4 * (sequence * shape.inputs.max_pages + position // PAGE_TOKENS)
    return int(view(at, (1,), np.int32)[0])


def _slots(shape: StepShape) -> list[tuple[int, int]]:
    positions = view(shape.inputs.positions, (shape.n_tokens,), np.int32)
    return [(_page_of(shape, row, int(p)), int(p) % PAGE_TOKENS) for row, p in enumerate(positions)]


def _past(
    shape: StepShape,
    row: int,
    past: NDArray[np.int64],
    cache: KvLayerArrays,
    kv_heads: int,
    head_dim: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values f32 [len(past), kv_heads, head_dim] of a token's sequence."""
    pages = [_page_of(shape, row, int(position)) for position in past]
    found = []
    for base in (cache.keys, cache.values):
        rows = [
            _page(base, page, kv_heads, head_dim)[:, int(position) % PAGE_TOKENS]
            for page, position in zip(pages, past, strict=True)
        ]
        found.append(np.stack(rows).astype(np.float32))
    return found[0], found[1]
