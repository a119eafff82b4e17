"""Which tensors of a model become what on the device, how many bytes that is, and bringing them there.

Matrices are laid out by the kernels, row by row; rows that are looked up stay in file order; vectors are f32. All
matrices lie in one allocation in the order in which a pass reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.units import TensorRef
from worker.cuda.kernel_set import KernelSet
from worker.cuda.lowering import DeviceWeights
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.upload import RAW_BUFFERS, Part, Progress, upload
from worker.cuda.values import RowTable
from worker.model.gguf import ModelFile
from worker.model.quants import dequantize
from worker.model.types import BY_NAME
from worker.ops.oplist import OpKind, OpList, Weight

LARGEST_PART_BYTES, SMALLEST_PART_BYTES = 32 << 20, 4 << 20  # of the file; what is laid out at once


@dataclass(frozen=True)
class WeightPlan:
    """Offsets from the start of the one allocation, by index of the op list's weights."""

    matrices: dict[int, int]
    tables: dict[int, int]
    vectors: dict[int, int]
    total_bytes: int


def plan_weights(oplist: OpList, kernels: KernelSet) -> WeightPlan:
    """Places for everything the op list reads. Raises EngineStartError for a type without kernels."""
    looked_up = {op.weights[0] for op in oplist.ops if op.kind == OpKind.EMBED}
    plan = WeightPlan({}, {}, {}, 0)
    end = 0
    for index, weight in enumerate(oplist.weights):
        tensor = weight.tensor
        for places, size_bytes in (
            (plan.matrices, _matrix_bytes(tensor, kernels) if weight.packed and tensor else 0),
            (plan.tables, tensor.bytes if index in looked_up and tensor else 0),
            (plan.vectors, 4 * _vector_length(weight) if is_vector(weight) else 0),
        ):
            if size_bytes:
                places[index] = end
                end += aligned(size_bytes)
    return WeightPlan(plan.matrices, plan.tables, plan.vectors, end)


def part_bytes_for(kv_bytes: int) -> int:
    """Parts whose raw buffers fit where keys and values will be, if those are not very few."""
    return min(LARGEST_PART_BYTES, max(SMALLEST_PART_BYTES, kv_bytes // RAW_BUFFERS))


def upload_bytes(oplist: OpList, plan: WeightPlan, part_bytes: int) -> int:
    """Raw buffers that the upload of a plan wants for its time."""
    tensors = [_tensor(oplist, index) for index in plan.matrices]
    largest = max((_part_rows(t, part_bytes) * _file_row_bytes(t) for t in tensors), default=0)
    return RAW_BUFFERS * aligned(largest)


def _file_row_bytes(tensor: TensorRef) -> int:
    return tensor.bytes // (tensor.rows * tensor.experts)


def _part_rows(tensor: TensorRef, part_bytes: int) -> int:
    """Rows that are laid out at once."""
    return min(tensor.rows * tensor.experts, max(1, part_bytes // _file_row_bytes(tensor)))


def is_vector(weight: Weight) -> bool:
    return weight.tensor is None or len(weight.tensor.shape) == 1


def _vector_length(weight: Weight) -> int:
    return len(weight.constant) if weight.tensor is None else weight.tensor.columns


def _matrix_bytes(tensor: TensorRef, kernels: KernelSet) -> int:
    row_bytes = kernels.row_bytes(BY_NAME[tensor.type].id, tensor.columns)
    return tensor.experts * tensor.rows * row_bytes


class PlacedWeights:
    """Weights that have their places on the device; `upload` brings them there.

    Raises EngineStartError where there is no room. `handles` may be used before, for whatever does not run before.
    """

    def __init__(
        self, file: ModelFile, oplist: OpList, kernels: KernelSet, memory: DeviceMemory, part_bytes: int
    ) -> None:
        self._file, self._oplist, self._memory = file, oplist, memory
        self._plan = plan = plan_weights(oplist, kernels)
        self._base = base = memory.take("weights", plan.total_bytes)
        self._parts: list[Part] = []
        for index, offset in sorted(plan.matrices.items(), key=lambda item: item[1]):
            self._parts += _matrix_parts(_tensor(oplist, index), kernels, base + offset, part_bytes)
        for index, offset in plan.tables.items():
            tensor = _tensor(oplist, index)
            self._parts.append(Part(tensor.file_index, tensor.offset_bytes, tensor.bytes, base + offset))
        self.handles = _handles(oplist, kernels, plan, base)
        kernels.compile_ahead(lambda: _lay_out_all(self._parts, base))

    def upload(self, raw_address: int, readers: int, progress: Progress) -> None:
        """Everything to its place, through `upload_bytes` of memory at `raw_address`. Raises OSError when the file
        changes meanwhile."""
        _upload_vectors(self._file, self._oplist, self._plan, self._base, self._memory)
        paths = [str(path) for path in self._file.paths]
        upload(self._memory.device, paths, self._parts, raw_address, readers, progress)


def _lay_out_all(parts: list[Part], raw: int) -> None:
    for part in parts:
        if part.lay_out is not None:
            part.lay_out(raw)


def _tensor(oplist: OpList, index: int) -> TensorRef:
    tensor = oplist.weights[index].tensor
    assert tensor is not None
    return tensor


def _matrix_parts(tensor: TensorRef, kernels: KernelSet, target: int, part_bytes: int) -> list[Part]:
    """Row ranges of a matrix or of a whole stack, whose experts follow each other in file and on the device."""
    type_id, columns = BY_NAME[tensor.type].id, tensor.columns
    n_rows, step = tensor.rows * tensor.experts, _part_rows(tensor, part_bytes)
    file_row_bytes, row_bytes = _file_row_bytes(tensor), kernels.row_bytes(type_id, columns)
    parts = []
    for begin in range(0, n_rows, step):
        count = min(step, n_rows - begin)
        offset = tensor.offset_bytes + begin * file_row_bytes
        place = target + begin * row_bytes

        def lay_out(raw: int, count: int = count, place: int = place) -> None:
            kernels.lay_out(type_id, count, columns, raw, place)

        parts.append(Part(tensor.file_index, offset, count * file_row_bytes, lay_out=lay_out))
    return parts


def _upload_vectors(
    file: ModelFile, oplist: OpList, plan: WeightPlan, base: int, memory: DeviceMemory
) -> None:
    """They are small: gathered in one pinned block, one copy each."""
    sizes = {index: aligned(4 * _vector_length(oplist.weights[index])) for index in plan.vectors}
    host = memory.device.host_buffer(max(1, sum(sizes.values())))
    at = 0
    for index, offset in plan.vectors.items():
        values = vector_values(file, oplist.weights[index])
        host.array[at : at + values.nbytes] = values.view(np.uint8)
        memory.device.copy_in(base + offset, host.address + at, values.nbytes)
        at += sizes[index]
    memory.device.synchronize()
    host.close()


def vector_values(file: ModelFile, weight: Weight) -> NDArray[np.float32]:
    if weight.tensor is None:
        return np.asarray(weight.constant, np.float32)
    stored = file.tensor_bytes(weight.tensor.name)
    return np.array(dequantize(weight.tensor.type, stored, weight.tensor.shape), np.float32).reshape(-1)


def _handles(oplist: OpList, kernels: KernelSet, plan: WeightPlan, base: int) -> DeviceWeights:
    matrices, tables = {}, {}
    for index, offset in plan.matrices.items():
        tensor = _tensor(oplist, index)
        type_id = BY_NAME[tensor.type].id
        matrices[index] = kernels.matrix(type_id, tensor.rows, tensor.columns, tensor.experts, base + offset)
    for index, offset in plan.tables.items():
        tensor = _tensor(oplist, index)
        row_bytes = tensor.bytes // tensor.rows
        tables[index] = RowTable(BY_NAME[tensor.type].id, tensor.columns, base + offset, row_bytes)
    vectors = {index: base + offset for index, offset in plan.vectors.items()}
    return DeviceWeights(matrices, vectors, tables)
