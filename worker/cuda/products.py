"""The matrix products of one device: the executor's view on `linear.py`, with the scratch and cuBLAS they need."""

from __future__ import annotations

from collections.abc import Iterator

from worker.cuda import linear
from worker.cuda.driver import Launcher
from worker.cuda.few import FEW_TOKENS
from worker.cuda.formats import GpuMatrix
from worker.cuda.fusion import folded_routers
from worker.cuda.matmul import Activations, Epilogue, Norm, Part, gemv
from worker.cuda.matmul_few_moe import norm_and_route, takes_few
from worker.cuda.matmul_moe import Chosen, Experts, RouterRule, router_logits
from worker.cuda.memory import aligned
from worker.cuda.prefill import Blas, matrix_halves_bytes
from worker.cuda.router import choose_experts
from worker.cuda.router_fold import FoldedRouter, RouterCall, can_fold, fold_router, folded_bytes
from worker.cuda.values import FoldedNorm, Rows
from worker.model.types import BY_NAME
from worker.ops.oplist import MoeInts, OpKind, OpList, RouterInts

# A matrix that would take more than this as f16 (a head) is multiplied with its weights unpacked in the kernel instead.
MOST_HALVES_BYTES = 256 << 20
NORMED_TOKENS = 2  # up to here a norm is cheaper inside of the matrices that read it


def matrix_shape(oplist: OpList, index: int) -> GpuMatrix:
    """A weight of the op list as the wrappers know matrices, at no address."""
    tensor = oplist.weights[index].tensor
    assert tensor is not None
    return GpuMatrix(BY_NAME[tensor.type].id, tensor.rows, tensor.columns, 0, tensor.experts)


class Products:
    """`pdl`: kernels may start while the one in front of them ends. `blas`: None where there is no cuBLAS.

    `folds`: routers may become a part of the product in front of them."""

    def __init__(self, launcher: Launcher, blas: Blas | None, pdl: bool, folds: bool) -> None:
        self._launcher, self._blas, self._pdl, self._folds = launcher, blas, pdl, folds
        self._logits_bytes = self._row_bytes = self._folded_bytes = 0  # of one token, for mixtures
        self._logits = self._row = self._folded_rows = self._scratch = 0
        self._folds_due: list[tuple[FoldedRouter, GpuMatrix, GpuMatrix, int]] = []

    def scratch_bytes(self, oplist: OpList, max_tokens: int, max_outputs: int) -> int:
        """Of the largest product of a step of up to so many rows."""
        shapes: set[tuple[OpKind, tuple[GpuMatrix, ...], int, int]] = set()
        for op in oplist.ops:
            if op.kind in (OpKind.LINEAR, OpKind.MOE):
                rows = max_outputs if oplist.buffers[op.inputs[0]].is_output else max_tokens
                matrices = tuple(matrix_shape(oplist, index) for index in op.weights)
                n_used = MoeInts(*op.ints).n_used if op.kind == OpKind.MOE else 0
                shapes.add((op.kind, matrices, rows, n_used))
        routers = (RouterInts(*op.ints) for op in oplist.ops if op.kind == OpKind.ROUTER)
        routed = max((ints.n_experts for ints in routers), default=0)
        added = max(
            (oplist.buffers[op.outputs[0]].width for op in oplist.ops if op.kind == OpKind.MOE), default=0
        )
        self._logits_bytes, self._row_bytes = aligned(4 * FEW_TOKENS * routed), aligned(4 * added)
        self._folded_bytes = sum(self._folded_sizes(oplist))
        own = self._logits_bytes + self._row_bytes + self._folded_bytes
        return own + max((self._shape_bytes(*shape) for shape in shapes), default=0)

    def _folded_sizes(self, oplist: OpList) -> Iterator[int]:
        for product, router in folded_routers(oplist).items():
            matrix, rows = (matrix_shape(oplist, oplist.ops[at].weights[0]) for at in (product, router))
            if self._can_fold(matrix, rows):
                yield aligned(folded_bytes(matrix, rows.rows))

    def _can_fold(self, matrix: GpuMatrix, router: GpuMatrix) -> bool:
        return self._folds and can_fold(matrix, router, self._launcher.sm_count)

    def _shape_bytes(self, kind: OpKind, matrices: tuple[GpuMatrix, ...], rows: int, n_used: int) -> int:
        if kind == OpKind.MOE:
            gate, up, down = matrices
            experts = Experts(gate, up, down, n_used)
            return max(linear.moe_workspace_bytes(experts, count) for count in range(1, rows + 1))
        parts = [Part(matrix, 0, 0) for matrix in matrices]
        if self._blas_for(matrices) is None:  # halves of the activations only
            return aligned(2 * rows * matrices[0].cols)
        return linear.linear_workspace_bytes(parts, rows)

    def use_scratch(self, address: int) -> None:
        """After `scratch_bytes`; logits and the residual row of one token and folded routers stand in front."""
        self._logits, self._row = address, address + self._logits_bytes
        self._folded_rows = self._row + self._row_bytes
        self._scratch = self._folded_rows + self._folded_bytes

    def fold_router(self, matrix: GpuMatrix, router: GpuMatrix, norm: int) -> FoldedRouter | None:
        """The rows, which `derive_weights` makes, get the next place among those that `scratch_bytes` counted."""
        if not self._can_fold(matrix, router):
            return None
        folded = FoldedRouter(self._folded_rows, router.rows)
        self._folded_rows += aligned(folded_bytes(matrix, router.rows))
        self._folds_due.append((folded, matrix, router, norm))
        return folded

    def derive_weights(self) -> None:
        """Fill the rows of all folded routers, once the weights are on the device."""
        for folded, matrix, router, norm in self._folds_due:
            fold_router(self._launcher, folded, matrix, router, norm)

    def routed_linear(
        self,
        source: Rows,
        matrix: GpuMatrix,
        out: Rows,
        folded: FoldedRouter,
        gating: int,
        normalize: bool,
        scale: float,
        epsilon: float,
    ) -> RouterRule:
        """For one token: `out` plus the product goes to a row of its own, because all blocks still read `out` for the
        router; the mixture's sum brings it back."""
        gemv(
            self._launcher,
            [Part(matrix, self._row, matrix.rows, residual=out.values)],
            _activations(source, 1),
            1,
            epilogue=Epilogue(accumulate=True),
            router=RouterCall(folded, out.values, self._logits),
            pdl=self._pdl,
        )
        return RouterRule(self._logits, 0, gating == 1, normalize, scale, self._row, epsilon)

    def _blas_for(self, matrices: tuple[GpuMatrix, ...]) -> Blas | None:
        fits = all(matrix_halves_bytes(matrix) <= MOST_HALVES_BYTES for matrix in matrices)
        return self._blas if fits else None

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
        if not rows:
            return
        parts = [
            Part(matrix, out.values, out.width, bias)
            for matrix, out, bias in zip(matrices, outs, biases, strict=True)
        ]
        linear.linear(
            self._launcher,
            parts,
            _activations(source, rows),
            rows,
            norm=_norm(source, rows),
            epilogue=Epilogue(accumulate, scale if scale != 1.0 else 0.0, softcap),
            blas=self._blas_for(matrices),
            workspace=self._scratch,
            pdl=self._pdl,
        )

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
        linear.moe(
            self._launcher,
            Experts(*stacks, ids.width, activation),
            Chosen(ids.values, weights.values),
            _activations(source, rows),
            rows,
            out.values,
            self._scratch,
            accumulate=accumulate,
            pdl=self._pdl,
        )

    def router_logits(
        self,
        rows: int,
        source: Rows,
        matrix: GpuMatrix,
        bias: int,
        gating: int,
        normalize: int,
        scale: float,
    ) -> RouterRule:
        """For few tokens, whose norm is folded: the logits, and how the mixture will choose from them. More than one
        token's rows get their codes, too."""
        assert source.norm
        norm, values = Norm(source.norm.weights, source.norm.epsilon), source.norm.values
        if rows == 1:
            router_logits(self._launcher, matrix, values, norm, self._logits, self._pdl)
        else:
            codes = Activations(0, source.codes, source.scales, source.sums)
            norm_and_route(self._launcher, matrix, values, norm, rows, self._logits, codes, self._pdl)
        return RouterRule(self._logits, bias, gating == 1, bool(normalize), scale)

    def routed_moe(
        self,
        rows: int,
        source: Rows,
        rule: RouterRule,
        ids: Rows,
        weights: Rows,
        stacks: tuple[GpuMatrix, GpuMatrix, GpuMatrix],
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None:
        """For few tokens behind `router_logits` or `routed_linear`: the choice happens in the kernels, and for one
        token the norm. `ids` and `weights` are for kernels that can not choose."""
        experts = Experts(*stacks, ids.width, activation)
        choice: RouterRule | Chosen = rule
        if rows > 1 and not takes_few(self._launcher, experts, rows):
            choose_experts(
                self._launcher,
                rule,
                experts.gate.experts,
                ids.width,
                rows,
                ids.values,
                weights.values,
                self._pdl,
            )
            choice = Chosen(ids.values, weights.values)
        linear.moe(
            self._launcher,
            experts,
            choice,
            Activations(rule.residual) if rule.residual else _activations(source, rows),
            rows,
            out.values,
            self._scratch,
            accumulate=accumulate,
            norm=_norm(source, rows),
            pdl=self._pdl,
        )

    def takes_network(self, rows: int, matrices: tuple[GpuMatrix, GpuMatrix, GpuMatrix]) -> bool:
        return linear.takes_network(self._launcher, Experts(*matrices, 1), rows)

    def network(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[GpuMatrix, GpuMatrix, GpuMatrix],
        hidden: Rows,
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None:
        """A dense network of few rows: a mixture of one expert."""
        linear.dense_network(
            self._launcher,
            Experts(*matrices, 1, activation),
            _activations(source, rows),
            rows,
            hidden.values,
            out.values,
            self._scratch,
            accumulate=accumulate,
            norm=_norm(source, rows),
            pdl=self._pdl,
        )


def reads_before_norm(norm: FoldedNorm, rows: int) -> bool:
    """Whether the readers of a folded norm apply it themselves in a step of so many rows: matrices while they are
    vectors' kernels, and a router for itself and its mixture."""
    most = {"router": FEW_TOKENS, "network": 1, "matrices": NORMED_TOKENS}
    return rows <= most[norm.reader]


def _norm(source: Rows, rows: int) -> Norm | None:
    """The norm that the matrices of `source` have to apply."""
    if source.norm is None or not reads_before_norm(source.norm, rows):
        return None
    if source.norm.reader == "router" and rows > 1:
        return None  # the router has done it
    return Norm(source.norm.weights, source.norm.epsilon)


def _activations(source: Rows, rows: int) -> Activations:
    """In the forms that the buffer has in a step of so many rows."""
    if source.norm and _norm(source, rows):
        return Activations(source.norm.values)
    if not source.codes:
        return Activations(source.values)
    if linear.needs_codes(rows):
        return Activations(source.values, source.codes, source.scales, source.sums)
    return Activations(source.values, halves=source.halves)
