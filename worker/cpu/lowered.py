"""An op list as the structs of the C ABI."""

from __future__ import annotations

from ctypes import c_float, c_int32

from worker.cpu.structs import BufferStruct, OpStruct
from worker.ops.oplist import Op, OpList

NONE = -1


def lowered_structs(oplist: OpList) -> tuple[list[OpStruct], list[BufferStruct]]:
    """Ops and buffers of `oplist`, ids unchanged."""
    buffers = [BufferStruct(buffer.width, int(buffer.is_output)) for buffer in oplist.buffers]
    return [_op_struct(op) for op in oplist.ops], buffers


def _op_struct(op: Op) -> OpStruct:
    ids = c_int32 * 4
    return OpStruct(
        int(op.kind),
        op.layer,
        ids(*_padded(op.inputs)),
        ids(*_padded(op.outputs)),
        ids(*_padded(op.weights)),
        ids(*_padded(op.biases)),
        (c_int32 * 8)(*op.ints),
        (c_float * 4)(*op.floats),
    )


def _padded(ids: tuple[int, ...]) -> list[int]:
    return [*ids, *[NONE] * (4 - len(ids))]
