"""From the op list to launches: a flat list of functions, each queueing the kernels of one op for a step's shape.

Built once per model; a step runs the list top to bottom, eagerly or while a graph records it. No arithmetic and no
decision about data in here: only which call with which addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from worker.cuda.fusion import dense_networks, folded_norms, folded_routers
from worker.cuda.kernel_set import KernelSet, Matrix
from worker.cuda.kv_cache import DeviceKvCache
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.values import FoldedNorm, Rows, RowTable, StepShape
from worker.ops.oplist import (
    AttentionInts,
    Buffer,
    LinearInts,
    MoeInts,
    Op,
    OpKind,
    OpList,
    RopeStoreInts,
    RouterInts,
)

GROUP = 32  # activations that share a scale
_FLOAT_TYPES = ("F32", "F16", "BF16")
_MATRIX_OPS = (OpKind.LINEAR, OpKind.ROUTER, OpKind.MOE)


@dataclass(frozen=True)
class Launch:
    """`enqueue(shape)` queues the op's kernels; cancellation is looked at where `layer` changes.

    `makes_outputs`: it works on rows of outputs, of which a step in the middle of a prompt has none.
    """

    kind: OpKind
    layer: int
    makes_outputs: bool
    enqueue: Callable[[StepShape], None]


@dataclass(frozen=True)
class DeviceWeights:
    """By index of the op list's weights: laid-out matrices, f32 vectors, tables of rows."""

    matrices: dict[int, Matrix]
    vectors: dict[int, int]
    tables: dict[int, RowTable]


def matrix_sources(oplist: OpList) -> set[int]:
    """Buffers that matrices multiply, including the product that a MOE op makes of its own."""
    return {op.inputs[0] for op in oplist.ops if op.kind in _MATRIX_OPS}


def values_are_read(oplist: OpList, at: int, buffer: int) -> bool:
    """Whether anything reads the f32 that op `at` leaves in `buffer`, before it is written again: all but quantised
    matrices do.
    """
    for op in oplist.ops[at + 1 :]:
        multiplies = op.kind in (OpKind.LINEAR, OpKind.MOE) and op.inputs[0] == buffer
        if buffer in op.inputs and not (multiplies and _is_quantised(oplist, op)):
            return True
        if buffer in op.outputs:
            return False
    return False


def _is_quantised(oplist: OpList, op: Op) -> bool:
    tensors = [oplist.weights[index].tensor for index in op.weights]
    return all(tensor is not None and tensor.type not in _FLOAT_TYPES for tensor in tensors)


def buffer_bytes(oplist: OpList, max_tokens: int, max_outputs: int) -> int:
    """What `allocate_buffers` takes."""
    sources = matrix_sources(oplist)
    return sum(
        sum(_part_bytes(buffer, index in sources, max_outputs if buffer.is_output else max_tokens))
        for index, buffer in enumerate(oplist.buffers)
    )


def _part_bytes(buffer: Buffer, is_source: bool, rows: int) -> list[int]:
    """values, then codes, scales and sums of a buffer that matrices multiply; together these hold its halves too."""
    values = rows * buffer.width
    groups = rows * -(-buffer.width // GROUP)
    parts = [4 * values] + ([values, 4 * groups, max(4 * groups, values)] if is_source else [])
    return [aligned(part) for part in parts]


def allocate_buffers(
    oplist: OpList, memory: DeviceMemory, max_tokens: int, max_outputs: int
) -> tuple[Rows, ...]:
    """Room for every buffer, by index."""
    sources = matrix_sources(oplist)
    made = []
    for index, buffer in enumerate(oplist.buffers):
        rows = max_outputs if buffer.is_output else max_tokens
        parts = _part_bytes(buffer, index in sources, rows)
        address = memory.take("workspace", sum(parts), zeroed=True)
        places = [address + sum(parts[:part]) for part in range(len(parts))]
        values, *forms = places
        codes, scales, sums = forms or (0, 0, 0)
        made.append(Rows(values, buffer.width, codes, scales, sums, halves=codes))
    return tuple(made)


class Lowering:
    """Knows the addresses; makes one Launch per op."""

    def __init__(
        self,
        oplist: OpList,
        kernels: KernelSet,
        buffers: tuple[Rows, ...],
        weights: DeviceWeights,
        cache: DeviceKvCache,
        passing_layers: tuple[int, ...] = (),
    ) -> None:
        self.oplist, self.kernels = oplist, kernels
        self.buffers, self.weights, self.cache = buffers, weights, cache
        self._folded, self._networks = folded_norms(oplist), dense_networks(oplist)
        self._routers = {
            product: (router, folded)
            for product, router in folded_routers(oplist).items()
            if oplist.ops[product].layer not in passing_layers
            and (folded := self._fold_router(product, router)) is not None
        }

    def launches(self) -> tuple[Launch, ...]:
        return tuple(
            Launch(op.kind, op.layer, self._makes_outputs(op), _LOWER[op.kind](self, op, index))
            for index, op in enumerate(self.oplist.ops)
        )

    def _norm_at(self, at: int) -> FoldedNorm:
        op = self.oplist.ops[at]
        source, weights = self.buffers[op.inputs[0]].values, self.vector(op.weights[0])
        reader = min(index for index, norm in self._folded.items() if norm == at)
        if self.oplist.ops[reader].kind == OpKind.ROUTER:
            return FoldedNorm(source, weights, op.floats[0], "router")
        return FoldedNorm(source, weights, op.floats[0], "network" if self.network_at(reader) else "matrices")

    def _fold_router(self, product: int, router: int) -> Any:
        (matrix,), (rows,) = (self.matrices(self.oplist.ops[at]) for at in (product, router))
        return self.kernels.fold_router(matrix, rows, self.vector(self.oplist.ops[router - 1].weights[0]))

    def router_behind(self, at: int) -> tuple[Op, float, Any] | None:
        """The router that product `at` takes along in a step of one row, the epsilon of its norm, and its rows."""
        if at not in self._routers:
            return None
        router, folded = self._routers[at]
        return self.oplist.ops[router], self.oplist.ops[router - 1].floats[0], folded

    def source(self, op: Op, at: int) -> Rows:
        """The rows that the matrices of `op` multiply, with the norm in front of them if it can be folded."""
        rows = self.buffers[op.inputs[0]]
        return replace(rows, norm=self._norm_at(self._folded[at])) if at in self._folded else rows

    def network_at(self, at: int) -> bool:
        """Whether op `at` begins a dense network."""
        return at in self._networks

    def network_matrices(self, at: int) -> tuple[Matrix, Matrix, Matrix]:
        """gate, up and down of the network that begins at `at`."""
        (gate, up), (down,) = self.matrices(self.oplist.ops[at]), self.matrices(self.oplist.ops[at + 2])
        return gate, up, down

    def inputs(self, op: Op) -> tuple[Rows, ...]:
        return tuple(self.buffers[index] for index in op.inputs)

    def outputs(self, op: Op) -> tuple[Rows, ...]:
        return tuple(self.buffers[index] for index in op.outputs)

    def vector(self, index: int) -> int:
        return 0 if index < 0 else self.weights.vectors[index]

    def product(self, op: Op, at: int) -> Rows:
        """The one output of a norm, attention or gated product, with what its readers want of it."""
        rows = self.buffers[op.outputs[0]]
        norm = self._norm_at(at) if at in self._folded.values() else None
        return replace(rows, values_are_read=values_are_read(self.oplist, at, op.outputs[0]), norm=norm)

    def matrices(self, op: Op) -> tuple[Matrix, ...]:
        return tuple(self.weights.matrices[index] for index in op.weights)

    def is_output(self, buffer: int) -> bool:
        return self.oplist.buffers[buffer].is_output

    def _makes_outputs(self, op: Op) -> bool:
        return any(self.is_output(buffer) for buffer in (*op.inputs, *op.outputs))


Enqueue = Callable[[StepShape], None]


def _rows_of(lowering: Lowering, buffer: int) -> Callable[[StepShape], int]:
    """How many rows an op on this buffer has: those of the outputs or those of the tokens."""
    if lowering.is_output(buffer):
        return lambda shape: shape.n_outputs
    return lambda shape: shape.n_tokens


def _embed(lowering: Lowering, op: Op, at: int) -> Enqueue:
    table, (out,), scale = lowering.weights.tables[op.weights[0]], lowering.outputs(op), op.floats[0]
    return lambda shape: lowering.kernels.embed(shape, table, out, scale)


def _rms_norm(lowering: Lowering, op: Op, at: int) -> Enqueue:
    (source,), out, weight = lowering.inputs(op), lowering.product(op, at), lowering.vector(op.weights[0])
    rows, eps, add = _rows_of(lowering, op.inputs[0]), op.floats[0], bool(op.ints[0])
    return lambda shape: lowering.kernels.rms_norm(rows(shape), source, weight, out, eps, add, shape)


def _linear(lowering: Lowering, op: Op, at: int) -> Enqueue:
    source, outs, matrices = lowering.source(op, at), lowering.outputs(op), lowering.matrices(op)
    biases = tuple(lowering.vector(index) for index in op.biases)
    rows, (scale, softcap) = _rows_of(lowering, op.inputs[0]), op.floats
    accumulate = bool(LinearInts(*op.ints).accumulates)

    def enqueue(shape: StepShape) -> None:
        lowering.kernels.linear(
            rows(shape), source, matrices, outs, biases, accumulate, scale or 1.0, softcap, shape
        )

    if (behind := lowering.router_behind(at)) is not None:
        return _routed_linear(lowering, source, matrices[0], outs[0], behind, enqueue)
    if lowering.network_at(at):
        return _network(lowering, op, at, enqueue)
    return _unless_network(lowering, at - 2, rows, enqueue)


def _routed_linear(
    lowering: Lowering,
    source: Rows,
    matrix: Matrix,
    out: Rows,
    behind: tuple[Op, float, Any],
    otherwise: Enqueue,
) -> Enqueue:
    router, epsilon, folded = behind
    ints, scale = RouterInts(*router.ints), router.floats[0]

    def enqueue(shape: StepShape) -> None:
        if shape.n_tokens != 1:
            otherwise(shape)
            return
        lowering.kernels.routed_linear(source, matrix, out, folded, ints, scale, epsilon)

    return enqueue


def _network(lowering: Lowering, op: Op, at: int, otherwise: Enqueue) -> Enqueue:
    """gate and up in a step whose rows the kernels take as a whole network: all three ops."""
    source, (hidden, _) = lowering.source(op, at), lowering.outputs(op)
    glu, last = lowering.oplist.ops[at + 1 : at + 3]
    (out,), matrices = lowering.outputs(last), lowering.network_matrices(at)
    rows, activation = _rows_of(lowering, op.inputs[0]), glu.ints[0]
    accumulate = bool(LinearInts(*last.ints).accumulates)

    def enqueue(shape: StepShape) -> None:
        if not lowering.kernels.takes_network(rows(shape), matrices):
            otherwise(shape)
            return
        lowering.kernels.network(rows(shape), source, matrices, hidden, out, activation, accumulate, shape)

    return enqueue


def _unless_network(
    lowering: Lowering, begin: int, rows: Callable[[StepShape], int], enqueue: Enqueue
) -> Enqueue:
    """Nothing, where the op is part of a network that began at `begin` and has been queued there."""
    if not lowering.network_at(begin):
        return enqueue
    matrices = lowering.network_matrices(begin)
    return lambda shape: None if lowering.kernels.takes_network(rows(shape), matrices) else enqueue(shape)


def _rope_store(lowering: Lowering, op: Op, at: int) -> Enqueue:
    query, key, value = lowering.inputs(op)
    q_norm, k_norm, frequencies = (lowering.vector(index) for index in op.weights)
    ints = RopeStoreInts(*op.ints)
    cache = lowering.cache.layers[ints.kv_layer]
    return lambda shape: lowering.kernels.rope_store(
        shape, query, key, value, q_norm, k_norm, frequencies, ints, op.floats, cache
    )


def _attention(lowering: Lowering, op: Op, at: int) -> Enqueue:
    (query,), out, ints = lowering.inputs(op), lowering.product(op, at), AttentionInts(*op.ints)
    cache = lowering.cache.layers[ints.kv_layer]
    return lambda shape: lowering.kernels.attention(shape, query, out, ints, op.floats, cache)


def _glu(lowering: Lowering, op: Op, at: int) -> Enqueue:
    (gate, up), out, activation = lowering.inputs(op), lowering.product(op, at), op.ints[0]
    rows = _rows_of(lowering, op.inputs[0])
    return _unless_network(
        lowering,
        at - 1,
        rows,
        lambda shape: lowering.kernels.glu(rows(shape), gate, up, out, activation, shape),
    )


def _router(lowering: Lowering, op: Op, at: int) -> Enqueue:
    source, (ids, weights), (matrix,) = lowering.source(op, at), lowering.outputs(op), lowering.matrices(op)
    bias, ints, scale = lowering.vector(op.biases[0]), RouterInts(*op.ints), op.floats[0]

    def enqueue(shape: StepShape) -> None:
        lowering.kernels.router(shape, source, matrix, bias, ids, weights, ints, scale)

    if lowering.router_behind(at - 2) is None:
        return enqueue
    return lambda shape: None if shape.n_tokens == 1 else enqueue(shape)


def _moe(lowering: Lowering, op: Op, at: int) -> Enqueue:
    source, (_, ids, weights), (out,) = lowering.source(op, at), lowering.inputs(op), lowering.outputs(op)
    gate, up, down = lowering.matrices(op)
    ints = MoeInts(*op.ints)
    return lambda shape: lowering.kernels.moe(
        shape, source, ids, weights, (gate, up, down), out, ints.activation, bool(ints.accumulates)
    )


def _select(lowering: Lowering, op: Op, at: int) -> Enqueue:
    (source,), (out,) = lowering.inputs(op), lowering.outputs(op)
    return lambda shape: lowering.kernels.select(shape, source, out)


def _sample(lowering: Lowering, op: Op, at: int) -> Enqueue:
    (logits,), n_vocab = lowering.inputs(op), op.ints[0]
    return lambda shape: lowering.kernels.sample(shape, logits, n_vocab)


_LOWER: dict[OpKind, Callable[[Lowering, Op, int], Enqueue]] = {
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
