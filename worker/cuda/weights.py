"""Which tensors of a model become what on the device, how many bytes that is, and bringing them there.

Matrices are laid out by the kernels, row by row; rows that are looked up stay in file order; vectors are f32. All
matrices lie in one allocation in the order in which a pass reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from configs.progress import ProgressCallback
from plans.units import TensorRef
from worker.cuda.kernel_set import KernelSet
from worker.cuda.lowering import DeviceWeights
from worker.cuda.memory import DeviceMemory, aligned
from worker.cuda.passing import BUFFERS as PASSING_BUFFERS
from worker.cuda.passing import NOTHING, Passing
from worker.cuda.passing import PART_BYTES as PASSING_PART_BYTES
from worker.cuda.upload import RAW_BUFFERS, Part, upload
from worker.cuda.values import RowTable
from worker.model.gguf import ModelFile
from worker.model.quants import dequantize
from worker.model.types import BY_NAME
from worker.ops.oplist import OpKind, OpList, Weight

LARGEST_PART_BYTES, SMALLEST_PART_BYTES = 32 << 20, 4 << 20  # of the file; what is laid out at once


@dataclass(frozen=True)
class WeightPlan:
    """Offsets from the start of the one allocation, by index of the op list's weights. `passing`: by layer, the
    matrices that pass through one place."""

    matrices: dict[int, int]
    tables: dict[int, int]
    vectors: dict[int, int]
    passing: dict[int, list[int]]
    total_bytes: int

    @property
    def guests(self) -> set[int]:
        return {index for indices in self.passing.values() for index in indices}


def plan_weights(oplist: OpList, kernels: KernelSet, passing: Passing = NOTHING) -> WeightPlan:
    """Places for everything the op list reads. Raises EngineStartError for a type without kernels."""
    looked_up = {op.weights[0] for op in oplist.ops if op.kind == OpKind.EMBED}
    guests = {layer: _matrices_of(oplist, layer) for layer in passing.layers}
    plan = WeightPlan({}, {}, {}, guests, 0)
    end = 0
    for index, weight in enumerate(oplist.weights):
        tensor = weight.tensor
        is_matrix = weight.packed and tensor and index not in plan.guests
        for places, size_bytes in (
            (plan.matrices, _matrix_bytes(tensor, kernels) if is_matrix and tensor else 0),
            (plan.tables, _table_bytes(tensor, passing) if index in looked_up and tensor else 0),
            (plan.vectors, 4 * _vector_length(weight) if is_vector(weight) else 0),
        ):
            if size_bytes:
                places[index] = end
                end += aligned(size_bytes)
    return replace(plan, total_bytes=_place_guests(oplist, kernels, plan, end))


def _matrices_of(oplist: OpList, layer: int) -> list[int]:
    """In the order in which a pass reads them."""
    used = [index for op in oplist.ops if op.layer == layer for index in op.weights if index >= 0]
    return [index for index in used if oplist.weights[index].packed and oplist.weights[index].tensor]


def _place_guests(oplist: OpList, kernels: KernelSet, plan: WeightPlan, begin: int) -> int:
    """Every layer's matrices from `begin` on; the end of the largest layer."""
    largest = begin
    for indices in plan.passing.values():
        end = begin
        for index in indices:
            plan.matrices[index] = end
            end += aligned(_matrix_bytes(_tensor(oplist, index), kernels))
        largest = max(largest, end)
    return largest


def _table_bytes(tensor: TensorRef, passing: Passing) -> int:
    """The whole table, or the rows of one step."""
    rows = passing.embedding_rows or tensor.rows
    return tensor.bytes // tensor.rows * rows


def part_bytes_for(kv_bytes: int) -> int:
    """Parts whose raw buffers fit where keys and values will be, if those are not very few."""
    return min(LARGEST_PART_BYTES, max(SMALLEST_PART_BYTES, kv_bytes // RAW_BUFFERS))


def upload_bytes(oplist: OpList, plan: WeightPlan, part_bytes: int) -> int:
    """Raw buffers that the upload of a plan wants for its time."""
    return RAW_BUFFERS * _largest_part_bytes(oplist, set(plan.matrices) - plan.guests, part_bytes)


def passing_bytes(oplist: OpList, plan: WeightPlan) -> int:
    """Raw buffers of what passes through."""
    return PASSING_BUFFERS * _largest_part_bytes(oplist, plan.guests, PASSING_PART_BYTES)


def _largest_part_bytes(oplist: OpList, matrices: set[int], part_bytes: int) -> int:
    tensors = [_tensor(oplist, index) for index in matrices]
    return aligned(max((_part_rows(t, part_bytes) * _file_row_bytes(t) for t in tensors), default=0))


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
        self,
        file: ModelFile,
        oplist: OpList,
        kernels: KernelSet,
        memory: DeviceMemory,
        part_bytes: int,
        passing: Passing = NOTHING,
    ) -> None:
        self._file, self._oplist, self._memory = file, oplist, memory
        self.plan = plan = plan_weights(oplist, kernels, passing)
        self._base = base = memory.take("weights", plan.total_bytes)
        self.passing_parts = {
            layer: [part for index in indices for part in self._parts_of(index, kernels, PASSING_PART_BYTES)]
            for layer, indices in plan.passing.items()
        }
        self._parts: list[Part] = []
        for index, _ in sorted(plan.matrices.items(), key=lambda item: item[1]):
            if index not in plan.guests:
                self._parts += self._parts_of(index, kernels, part_bytes)
        for index, offset in plan.tables.items() if not passing.embedding_rows else ():
            tensor = _tensor(oplist, index)
            self._parts.append(Part(tensor.file_index, tensor.offset_bytes, tensor.bytes, base + offset))
        self.handles = _handles(oplist, kernels, plan, base)
        every = [*self._parts, *(part for parts in self.passing_parts.values() for part in parts)]
        kernels.compile_ahead(lambda: _lay_out_all(every, base))

    def _parts_of(self, index: int, kernels: KernelSet, part_bytes: int) -> list[Part]:
        place = self._base + self.plan.matrices[index]
        return _matrix_parts(_tensor(self._oplist, index), kernels, place, part_bytes)

    def upload(self, raw_address: int, readers: int, progress: ProgressCallback) -> None:
        """Everything to its place, through `upload_bytes` of memory at `raw_address`. Raises OSError when the file
        changes meanwhile."""
        _upload_vectors(self._file, self._oplist, self.plan, self._base, self._memory)
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
