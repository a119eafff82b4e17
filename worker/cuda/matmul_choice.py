"""Which matrix kernels a step uses: by its number of rows, which also says what form the activations have to have."""

from __future__ import annotations

from worker.cuda import matmul
from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix
from worker.cuda.matmul import Activations, Epilogue, Part
from worker.cuda.values import Rows
from worker.ops.oplist import OpList


def reads_codes(rows: int) -> bool:
    """Whether matrices read 8-bit codes (and not f16) in a step of so many rows."""
    return True


class Matmul:
    """Matrix products of one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._scratch = 0

    def scratch_bytes(self, oplist: OpList, max_tokens: int) -> int:
        return 0

    def use_scratch(self, oplist: OpList, max_tokens: int, address: int) -> None:
        self._scratch = address

    def linear(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[GpuMatrix, ...],
        outs: tuple[Rows, ...],
        biases: tuple[int, ...],
        accumulate: bool,
        scale: float,
        softcap: float,
    ) -> None:
        epilogue = Epilogue(accumulate, scale if scale != 1.0 else 0.0, softcap)
        for first in range(0, rows, matmul.GEMV_TOKENS):
            parts = [
                Part(matrix, out.values + 4 * first * out.width, out.width, bias)
                for matrix, out, bias in zip(matrices, outs, biases, strict=True)
            ]
            count = min(matmul.GEMV_TOKENS, rows - first)
            moved = matmul.rows_from(_activations(source), first, source.width)
            matmul.gemv(self._launcher, parts, moved, count, epilogue=epilogue, pdl=False)


def _activations(source: Rows) -> Activations:
    return Activations(source.values, source.codes, source.scales, source.sums)
