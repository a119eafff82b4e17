"""What a pass reads, counted from the op list."""

from __future__ import annotations

from worker.ops.oplist import MoeInts, OpKind, OpList


def weight_bytes_per_token(oplist: OpList) -> int:
    """Bytes of the weights in the file that one decoded token reads; of a mixture's experts those that are chosen."""
    total = 0
    for op in oplist.ops:
        tensors = [oplist.weights[index].tensor for index in op.weights if index >= 0]
        if op.kind == OpKind.MOE:
            n_used = MoeInts(*op.ints).n_used
            total += sum(tensor.bytes * n_used // tensor.experts for tensor in tensors if tensor)
        elif op.kind in (OpKind.LINEAR, OpKind.ROUTER):
            total += sum(tensor.bytes for tensor in tensors if tensor)
    return total
