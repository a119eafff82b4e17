"""Brings the weights of a model to where the kernels want them, in the order in which a pass reads them.

Packed: one arena (huge pages where there are any) that holds every matrix in the kernels' 16-row layout, back to back,
so that a decode step is one sequential stream. Mapped: the matrices stay in the file and are packed on the fly.
Vectors (norms, biases) become f32 arrays; rows of the embedding are read from the mapping either way.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from configs.errors import ModelFileError
from configs.progress import ProgressCallback
from plans.units import TensorRef
from worker.cpu.handles import Arena
from worker.cpu.library import Library
from worker.cpu.structs import WeightStruct
from worker.model.gguf import ModelFile
from worker.model.quants import dequantize
from worker.model.types import BY_NAME
from worker.ops.oplist import OpList, Weight

ALIGNMENT_BYTES = 64
PACK_CHUNK_BYTES = 4 << 20  # one job of a packing thread


@dataclass
class LoadedWeights:
    """`structs` in the order of the op list's weights; the rest keeps what they point at alive."""

    structs: list[WeightStruct]
    arena: Arena | None
    file: ModelFile
    vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """What the packed weights and vectors take; mapped pages are the system's to keep or drop."""
        return (self.arena.size_bytes if self.arena else 0) + sum(vector.nbytes for vector in self.vectors)


def load_weights(
    library: Library,
    file: ModelFile,
    oplist: OpList,
    *,
    packed: bool,
    huge_pages: bool,
    threads: int,
    progress: ProgressCallback,
) -> LoadedWeights:
    """Raises ModelFileError for a type without kernels, EngineStartError when memory is refused."""
    _check_types(library, file, oplist)
    loaded = LoadedWeights([], None, file)
    for weight in oplist.weights:
        loaded.structs.append(_describe(library, file, weight, loaded.vectors))
    if packed:
        _pack_all(library, oplist, loaded, huge_pages, threads, progress)
    return loaded


def _check_types(library: Library, file: ModelFile, oplist: OpList) -> None:
    matrices = [w.tensor for w in oplist.weights if w.packed and w.tensor is not None]
    wrong = [t for t in matrices if not library.type_supported(BY_NAME[t.type].id)]
    if wrong:
        names = sorted({tensor.type for tensor in wrong})
        raise ModelFileError(
            f"{file.path}: {len(wrong)} matrices are of types without CPU kernels ({', '.join(names)}), "
            f"the first is {wrong[0].name}; use a file in F32, F16, BF16, Q4_0 to Q8_0 or Q2_K to Q6_K, "
            "or plan with --engines llama-server"
        )


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _describe(
    library: Library, file: ModelFile, weight: Weight, vectors: list[npt.NDArray[np.float32]]
) -> WeightStruct:
    """The struct of one weight as it lies in the file; vectors are converted and kept in `vectors`."""
    tensor = weight.tensor
    if tensor is None or len(tensor.shape) == 1:
        vectors.append(_vector(file, weight))
        return WeightStruct(0, 1, len(vectors[-1]), 1, None, _address(vectors[-1]), 0, 0)
    type_id = BY_NAME[tensor.type].id
    address = _address(file.tensor_bytes(tensor.name))
    stride = tensor.bytes // tensor.experts
    return WeightStruct(type_id, tensor.rows, tensor.columns, tensor.experts, None, address, 0, stride)


def _vector(file: ModelFile, weight: Weight) -> npt.NDArray[np.float32]:
    if weight.tensor is None:
        return np.asarray(weight.constant, np.float32)
    stored = file.tensor_bytes(weight.tensor.name)
    return np.array(dequantize(weight.tensor.type, stored, weight.tensor.shape), np.float32).reshape(-1)


def _pack_all(
    library: Library,
    oplist: OpList,
    loaded: LoadedWeights,
    huge_pages: bool,
    threads: int,
    progress: ProgressCallback,
) -> None:
    """Lay out the arena, then pack row ranges of all matrices on `threads` threads (the calls free the GIL)."""
    jobs: list[tuple[Callable[[], None], int]] = []
    offsets, size_bytes = _offsets(library, oplist)
    loaded.arena = library.arena(max(size_bytes, ALIGNMENT_BYTES), huge_pages)  # a part may have none
    for index, offset in offsets.items():
        struct, tensor = loaded.structs[index], oplist.weights[index].tensor
        assert tensor is not None
        struct.packed = loaded.arena.address + offset
        struct.packed_expert_bytes = library.packed_bytes(struct.type, struct.rows, struct.cols)
        jobs += _pack_jobs(library, struct, tensor)
    _advise(loaded.file, mmap.MADV_SEQUENTIAL)
    _run(jobs, threads, progress)
    _advise(loaded.file, mmap.MADV_RANDOM)


def _offsets(library: Library, oplist: OpList) -> tuple[dict[int, int], int]:
    offsets, end = {}, 0
    for index, weight in enumerate(oplist.weights):
        if weight.packed and weight.tensor is not None:
            tensor = weight.tensor
            offsets[index] = end
            one = library.packed_bytes(BY_NAME[tensor.type].id, tensor.rows, tensor.columns)
            end += -(-one * tensor.experts // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _pack_jobs(
    library: Library, struct: WeightStruct, tensor: TensorRef
) -> list[tuple[Callable[[], None], int]]:
    """Jobs of about PACK_CHUNK_BYTES of file each, with those bytes."""
    row_bytes = tensor.bytes // (tensor.experts * tensor.rows)
    rows = max(16, PACK_CHUNK_BYTES // row_bytes // 16 * 16)
    jobs: list[tuple[Callable[[], None], int]] = []
    for expert in range(tensor.experts):
        source = struct.file + expert * struct.file_expert_bytes
        target = struct.packed + expert * struct.packed_expert_bytes
        for begin in range(0, tensor.rows, rows):
            end = min(begin + rows, tensor.rows)
            arguments = (struct.type, struct.rows, struct.cols, source, target, begin, end)
            jobs.append((_bind(library, arguments), (end - begin) * row_bytes))
    return jobs


def _bind(library: Library, arguments: tuple[int, int, int, int, int, int, int]) -> Callable[[], None]:
    return lambda: library.pack(*arguments)


def _run(jobs: list[tuple[Callable[[], None], int]], threads: int, progress: ProgressCallback) -> None:
    total_bytes, done_bytes = sum(size for _, size in jobs), 0
    progress("packing", 0, total_bytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        for _, size in zip(pool.map(lambda job: job[0](), jobs), (size for _, size in jobs), strict=True):
            done_bytes += size
            progress("packing", done_bytes, total_bytes)


def _advise(file: ModelFile, advice: int) -> None:
    for buffer in file.buffers:
        buffer.madvise(advice)
