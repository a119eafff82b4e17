"""Which ops of a list may run inside of another's kernels when a step has few tokens.

A norm disappears into the matrices that read it, a router into the product in front of its norm; the two products of a
dense network and the gate between them become two launches. Nothing here launches: `lowering.py` asks, and
`cuda_kernels.py` does.
"""

from __future__ import annotations

from worker.model.types import BY_NAME
from worker.ops.oplist import LinearInts, MoeInts, Op, OpKind, OpList, RouterInts

_READERS = (OpKind.LINEAR, OpKind.ROUTER, OpKind.MOE)
_FLOAT_TYPES = ("F32", "F16", "BF16")
MOST_CHOSEN = 32  # experts of a token that kernels can find by themselves


def folded_norms(oplist: OpList) -> dict[int, int]:
    """Index of each op that may normalise its input itself, to the index of the norm in front of it.

    A norm is folded when only matrices read it, and nothing writes its input before the last of them has read.
    """
    folded: dict[int, int] = {}
    for at, op in enumerate(oplist.ops):
        readers = _matrix_readers(oplist, at) if op.kind == OpKind.RMS_NORM and not op.ints[0] else []
        folded.update(dict.fromkeys(readers, at))
    return folded


def _matrix_readers(oplist: OpList, at: int) -> list[int]:
    """Readers of the norm at `at`; none when it can not be folded."""
    (source,), (target,) = oplist.ops[at].inputs, oplist.ops[at].outputs
    readers: list[int] = []
    source_is_intact = source != target
    for index in range(at + 1, len(oplist.ops)):
        op = oplist.ops[index]
        if target in op.inputs:
            if op.kind not in _READERS or op.inputs[0] != target or not source_is_intact:
                return []
            readers.append(index)
        if target in op.outputs:
            break
        source_is_intact = source_is_intact and source not in op.outputs
    return readers if _are_servable(oplist, readers) else []


def _are_servable(oplist: OpList, readers: list[int]) -> bool:
    """A mixture finds its experts itself only together with its router, and wants quantised weights."""
    ops = [oplist.ops[index] for index in readers]
    kinds = [op.kind for op in ops]
    if OpKind.MOE not in kinds and OpKind.ROUTER not in kinds:
        return all(_cols_are_whole(oplist, op) for op in ops)
    return (
        kinds == [OpKind.ROUTER, OpKind.MOE]
        and RouterInts(*ops[0].ints).n_used <= MOST_CHOSEN
        and _is_quantised(oplist, ops[1])
        and _is_float(oplist, ops[0])
    )


def folded_routers(oplist: OpList) -> dict[int, int]:
    """Index of each product that may also make a router's logits, to the index of the router.

    The product is added to the residual stream, which the norm behind it reads for router and mixture and to which the
    mixture adds; a bias that steers the choice would need the norm first.
    """
    folded = folded_norms(oplist)
    return {
        router - 2: router
        for router, norm in folded.items()
        if oplist.ops[router].kind == OpKind.ROUTER and norm == router - 1 and _rides_along(oplist, router)
    }


def _rides_along(oplist: OpList, router: int) -> bool:
    if router < 2:
        return False
    product, norm, op, mixture = oplist.ops[router - 2 : router + 2]
    if product.kind != OpKind.LINEAR or mixture.kind != OpKind.MOE:
        return False
    bare = all(bias < 0 for bias in (*product.biases, *op.biases)) and not any(product.floats)
    adds = bool(LinearInts(*product.ints).accumulates and MoeInts(*mixture.ints).accumulates)
    stream = product.outputs == norm.inputs == mixture.outputs
    return len(product.weights) == 1 and bare and adds and stream and _is_quantised(oplist, product)


def _types(oplist: OpList, op: Op) -> list[str]:
    tensors = [oplist.weights[index].tensor for index in op.weights]
    return [tensor.type for tensor in tensors if tensor is not None]


def _is_quantised(oplist: OpList, op: Op) -> bool:
    return all(name not in _FLOAT_TYPES for name in _types(oplist, op))


def _is_float(oplist: OpList, op: Op) -> bool:
    return all(name in _FLOAT_TYPES for name in _types(oplist, op))


def _cols_are_whole(oplist: OpList, op: Op) -> bool:
    """The kernels normalise four columns at a time."""
    return all(BY_NAME[name].block_elements > 1 for name in _types(oplist, op)) or all(
        tensor is not None and tensor.columns % 4 == 0
        for tensor in (oplist.weights[index].tensor for index in op.weights)
    )


def dense_networks(oplist: OpList) -> set[int]:
    """Indices of the ops (gate and up) that begin a dense network: they, the gated product and down in a row."""
    return {at for at in range(len(oplist.ops) - 2) if _is_network(oplist, at)}


def _is_network(oplist: OpList, at: int) -> bool:
    gate_up, glu, down = oplist.ops[at : at + 3]
    if (gate_up.kind, glu.kind, down.kind) != (OpKind.LINEAR, OpKind.GLU, OpKind.LINEAR):
        return False
    connected = glu.inputs == gate_up.outputs and down.inputs == glu.outputs
    plain = len(gate_up.weights) == 2 and len(down.weights) == 1
    plain = plain and not LinearInts(*gate_up.ints).accumulates and not any((*gate_up.floats, *down.floats))
    bare = all(bias < 0 for bias in (*gate_up.biases, *down.biases))
    return connected and plain and bare and _is_quantised(oplist, gate_up) and _is_quantised(oplist, down)
