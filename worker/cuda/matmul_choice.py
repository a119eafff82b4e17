"""Which matrix kernels a step uses: by its number of rows, which also says what form the activations have to have."""

from __future__ import annotations

from worker.cuda import matmul, matmul_moe
from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix
from worker.cuda.matmul import Activations, Epilogue, Part
from worker.cuda.matmul_moe import Chosen, Experts
from worker.cuda.values import Rows
from worker.ops.oplist import Op, OpKind, OpList


def reads_codes(rows: int) -> bool:
    """Whether matrices read 8-bit codes (and not f16) in a step of so many rows."""
    return True


class Matmul:
    """Matrix products of one device. `pdl`: kernels may start while the one in front of them ends."""

    def __init__(self, launcher: Launcher, pdl: bool) -> None:
        self._launcher, self._pdl = launcher, pdl
        self._hidden = 0

    def scratch_bytes(self, oplist: OpList, max_tokens: int) -> int:
        """The gated products of a mixture's experts, f32 [GEMV_TOKENS, n_used, n_ff]."""
        sizes = [_hidden_bytes(oplist, op) for op in oplist.ops if op.kind == OpKind.MOE]
        return max(sizes, default=0)

    def use_scratch(self, oplist: OpList, max_tokens: int, address: int) -> None:
        self._hidden = address

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
            matmul.gemv(self._launcher, parts, moved, count, epilogue=epilogue, pdl=self._pdl)

    def moe(
        self,
        rows: int,
        source: Rows,
        ids: Rows,
        weights: Rows,
        stacks: tuple[GpuMatrix, GpuMatrix, GpuMatrix],
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None:
        experts = Experts(*stacks, ids.width, activation)
        for first in range(0, rows, matmul.GEMV_TOKENS):
            count = min(matmul.GEMV_TOKENS, rows - first)
            chosen = Chosen(ids.values + 4 * first * ids.width, weights.values + 4 * first * ids.width)
            moved = matmul.rows_from(_activations(source), first, source.width)
            target = out.values + 4 * first * out.width
            matmul_moe.moe_decode(
                self._launcher,
                experts,
                chosen,
                moved,
                count,
                self._hidden,
                target,
                accumulate=accumulate,
                pdl=self._pdl,
            )


def _hidden_bytes(oplist: OpList, op: Op) -> int:
    tensor = oplist.weights[op.weights[0]].tensor
    assert tensor is not None
    return 4 * matmul.GEMV_TOKENS * op.ints[1] * tensor.rows


def _activations(source: Rows) -> Activations:
    return Activations(source.values, source.codes, source.scales, source.sums)
