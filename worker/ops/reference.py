"""The numpy executor: runs an op list in float32, plainly, for truth.

Every function is the definition of one op kind; arrays are annotated with their shapes. It has the KV cache in f32 and
no rounding of activations, so it is what the fast executors are measured against.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from plans.placement import PAGE_TOKENS
from worker.model.gguf import ModelFile
from worker.model.quants import dequantize
from worker.ops.batch import Batch
from worker.ops.oplist import (
    AttentionInts,
    LinearInts,
    MoeInts,
    Op,
    OpKind,
    OpList,
    RopeStoreInts,
    RouterInts,
    Weight,
)

Float32Array = npt.NDArray[np.float32]
WeightSource = Callable[[Weight], Float32Array]


class ReferenceExecutor:
    """Runs `oplist` with weights from `weight_of`: f32 [experts?, rows, columns] or [n] per weight, fetched on use.

    `n_pages` KV pages of PAGE_TOKENS tokens. `run` returns the logits, f32 [n_outputs, n_vocab].
    """

    def __init__(self, oplist: OpList, weight_of: WeightSource, n_pages: int) -> None:
        self.oplist = oplist
        self.weight_of = weight_of
        shapes = [(n_pages * PAGE_TOKENS, kv.n_kv_heads, kv.head_dim) for kv in oplist.kv_layers]
        self.keys = [np.zeros(shape, np.float32) for shape in shapes]
        self.values = [np.zeros(shape, np.float32) for shape in shapes]
        self.buffers: list[Float32Array] = []

    def run(self, batch: Batch) -> Float32Array:
        counts = (len(batch.token_ids), len(batch.output_rows))
        self.buffers = [np.zeros((counts[b.is_output], b.width), np.float32) for b in self.oplist.buffers]
        for op in self.oplist.ops:
            _RUN[op.kind](self, op, batch)
        return self.buffers[self.oplist.buffer_index("logits")]

    def weight(self, index: int) -> Float32Array | None:
        return None if index < 0 else self.weight_of(self.oplist.weights[index])

    def required(self, index: int) -> Float32Array:
        weight = self.weight(index)
        assert weight is not None
        return weight

    def inputs(self, op: Op) -> list[Float32Array]:
        return [self.buffers[index] for index in op.inputs]


def reference_weights(file: ModelFile) -> WeightSource:
    """The weights of a model file, dequantised to f32 on first use and kept."""
    kept: dict[str, Float32Array] = {}

    def weight_of(weight: Weight) -> Float32Array:
        if weight.name not in kept:
            kept[weight.name] = _dequantized(file, weight)
        return kept[weight.name]

    return weight_of


def _dequantized(file: ModelFile, weight: Weight) -> Float32Array:
    if weight.tensor is None:
        return np.asarray(weight.constant, np.float32)
    tensor = weight.tensor
    values = dequantize(tensor.type, file.tensor_bytes(tensor.name), tensor.shape)
    return np.asarray(values, np.float32).reshape(tuple(reversed(tensor.shape)))


def _f32(x: npt.ArrayLike) -> Float32Array:
    return np.asarray(x, np.float32)


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return _f32(x / np.sqrt(mean_square + eps) * weight)


def rotate(
    x: Float32Array,
    positions: npt.NDArray[np.int32],
    inverse_frequencies: Float32Array,
    style: int,
    magnitude: float,
) -> Float32Array:
    """Rotary positions (Su et al. 2021) on x [n, heads, head_dim]; the first 2 * len(frequencies) dimensions turn."""
    angles = positions[:, None].astype(np.float64) * inverse_frequencies[None, :].astype(np.float64)
    cos = (np.cos(angles) * magnitude).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * magnitude).astype(np.float32)[:, None, :]
    half = len(inverse_frequencies)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if style == 0
        else (
            slice(0, half),
            slice(half, 2 * half),
        )
    )
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def activate(x: Float32Array, code: int) -> Float32Array:
    if code == 0:
        return _f32(x / (1 + np.exp(-np.maximum(x.astype(np.float64), -700.0))))  # exp(700) still is a number
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
    return _f32(0.5 * x * (1 + np.tanh(inner)))


def softmax(x: Float32Array) -> Float32Array:
    shifted = np.exp((x - x.max(axis=-1, keepdims=True)).astype(np.float64))
    return _f32(shifted / shifted.sum(axis=-1, keepdims=True))


def choose_experts(
    logits: Float32Array, bias: Float32Array | None, used: int, gating: int, normalize: bool, scale: float
) -> tuple[npt.NDArray[np.int32], Float32Array]:
    """ids and weights [n, used], best first, ties to the lower id; the bias steers the choice, not the weights."""
    scores = softmax(logits) if gating == 0 else (1 / (1 + np.exp(-logits))).astype(np.float32)
    ranked = scores if bias is None else scores + bias
    ids = np.argsort(-ranked, axis=-1, kind="stable")[:, :used].astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, (weights * scale).astype(np.float32)


def attend(
    query: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    visible: npt.NDArray[np.bool_],
    scale: float,
    cap: float,
) -> Float32Array:
    """query [n, heads, d], keys and values [t, kv_heads, d], visible [n, t] -> [n, heads, d]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = query.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) * np.float32(scale)  # [heads, n, t]
    if cap:
        scores = cap * np.tanh(scores / cap)
    weights = softmax(np.where(visible[None], scores, -np.inf).astype(np.float32))
    return _f32((weights @ values.transpose(1, 0, 2)).transpose(1, 0, 2))


def _embed(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    rows = executor.required(op.weights[0])[batch.token_ids]
    executor.buffers[op.outputs[0]][:] = rows * np.float32(op.floats[0])


def _rms_norm(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    normed = rms_norm(executor.inputs(op)[0], executor.required(op.weights[0]), op.floats[0])
    target = executor.buffers[op.outputs[0]]
    target[:] = target + normed if op.ints[0] else normed


def _linear(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    source, (scale, cap), ints = executor.inputs(op)[0], op.floats, LinearInts(*op.ints)
    for output, weight, bias in zip(op.outputs, op.weights, op.biases, strict=True):
        product = source @ executor.required(weight).T
        product = product * np.float32(scale) if scale else product
        offsets = executor.weight(bias)
        product = product if offsets is None else product + offsets
        product = cap * np.tanh(product / cap) if cap else product
        target = executor.buffers[output]
        target[:] = target + product if ints.accumulates else product


def _slots(batch: Batch, sequence: int, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Rows of the KV cache that hold these positions of a sequence."""
    pages = batch.page_tables[sequence][positions // PAGE_TOKENS]
    return np.asarray(pages.astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS, np.int64)


def _sequence_rows(batch: Batch) -> list[slice]:
    first = batch.sequence_first
    return [slice(int(first[s]), int(first[s + 1])) for s in range(len(first) - 1)]


def _rope_store(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    heads, kv_heads, head_dim, _, style, layer = RopeStoreInts(*op.ints)
    eps, magnitude = op.floats
    query, key, value = executor.inputs(op)
    q, k = query.reshape(-1, heads, head_dim), key.reshape(-1, kv_heads, head_dim)
    q_norm, k_norm = executor.weight(op.weights[0]), executor.weight(op.weights[1])
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    frequencies = executor.required(op.weights[2])
    query[:] = rotate(q, batch.positions, frequencies, style, magnitude).reshape(query.shape)
    k = rotate(k, batch.positions, frequencies, style, magnitude)
    for sequence, rows in enumerate(_sequence_rows(batch)):
        slots = _slots(batch, sequence, batch.positions[rows])
        executor.keys[layer][slots] = k[rows]
        executor.values[layer][slots] = value[rows].reshape(-1, kv_heads, head_dim)


def _attention(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    ints = AttentionInts(*op.ints)
    keys, values = executor.keys[ints.kv_layer], executor.values[ints.kv_layer]
    query = executor.inputs(op)[0].reshape(-1, ints.n_heads, ints.head_dim)
    for sequence, rows in enumerate(_sequence_rows(batch)):
        positions = batch.positions[rows]
        past = np.arange(positions[-1] + 1, dtype=np.int32) if len(positions) else positions
        slots = _slots(batch, sequence, past)
        visible = past[None, :] <= positions[:, None]
        if ints.window_tokens:
            visible &= past[None, :] > positions[:, None] - ints.window_tokens
        out = attend(query[rows], keys[slots], values[slots], visible, *op.floats)
        executor.buffers[op.outputs[0]][rows] = out.reshape(len(positions), -1)


def _glu(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    gate, up = executor.inputs(op)
    executor.buffers[op.outputs[0]][:] = activate(gate, op.ints[0]) * up


def _router(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    _, used, gating, normalize = RouterInts(*op.ints)
    logits = executor.inputs(op)[0] @ executor.required(op.weights[0]).T
    bias = executor.weight(op.biases[0])
    ids, weights = choose_experts(logits, bias, used, gating, bool(normalize), op.floats[0])
    executor.buffers[op.outputs[0]][:] = ids.view(np.float32)
    executor.buffers[op.outputs[1]][:] = weights


def _moe(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    source, ids, weights = executor.inputs(op)
    gate, up, down = (executor.required(index) for index in op.weights)
    target, ints = executor.buffers[op.outputs[0]], MoeInts(*op.ints)
    if not ints.accumulates:
        target[:] = 0
    for row, experts in enumerate(ids.view(np.int32)):
        for slot, expert in enumerate(experts):
            hidden = activate(gate[expert] @ source[row], ints.activation) * (up[expert] @ source[row])
            target[row] += weights[row, slot] * (down[expert] @ hidden)


def _select(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    executor.buffers[op.outputs[0]][:] = executor.inputs(op)[0][batch.output_rows]


def _sample(executor: ReferenceExecutor, op: Op, batch: Batch) -> None:
    """The reference hands out logits; choosing a token is the caller's."""


_RUN: dict[OpKind, Callable[[ReferenceExecutor, Op, Batch], None]] = {
    OpKind.EMBED: _embed,
    OpKind.RMS_NORM: _rms_norm,
    OpKind.LINEAR: _linear,
    OpKind.ROPE_STORE: _rope_store,
    OpKind.ATTENTION: _attention,
    OpKind.GLU: _glu,
    OpKind.ROUTER: _router,
    OpKind.MOE: _moe,
    OpKind.SELECT: _select,
    OpKind.SAMPLE: _sample,
}
