"""The kernel seam's real side: calls the wrappers of the CUDA files with the addresses that lowering knows.

Few rows (decode) are multiplied as 8-bit codes, many (prefill) as f16; norms, gated products and attention write the
codes where the matrices of the step will read them.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.cuda import attention, exchange, kv_pages, ops, router, sampler
from worker.cuda.attention_values import (
    FreshHeads,
    Heads,
    KvPointers,
    Rope,
    Scores,
    StepPointers,
    attention_heads,
)
from worker.cuda.blas import CuBlas
from worker.cuda.device import Device
from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix, planar_row_bytes
from worker.cuda.kernel_set import KernelSet
from worker.cuda.kv_cache import KvLayerArrays
from worker.cuda.kv_pages import HostLayer, PageList, Side
from worker.cuda.linear import needs_codes
from worker.cuda.matmul_moe import RouterRule
from worker.cuda.memory import aligned
from worker.cuda.ops import FileRows, Outputs
from worker.cuda.prefill import Blas
from worker.cuda.products import Products, reads_before_norm
from worker.cuda.repack import repack
from worker.cuda.router import Router
from worker.cuda.router_fold import FoldedRouter
from worker.cuda.sampling import SamplingBuffers
from worker.cuda.values import Rows, RowTable, StepShape
from worker.ops.oplist import AttentionInts, OpKind, OpList, RopeStoreInts, RouterInts

_F16 = 1  # ggml's type id


class CudaKernels(KernelSet):
    """KernelSet on one device's compute stream. `pdl`: kernels may start while the one in front of them ends.
    `folds_routers`: in steps of one row a router may run inside of the product in front of it."""

    def __init__(
        self,
        device: Device,
        launcher: Launcher | None = None,
        pdl: bool = True,
        folds_routers: bool = True,
        make_blas: Callable[[int], Blas | None] = CuBlas,
    ) -> None:
        self.launcher = launcher or Launcher(device.ordinal, device.stream)
        self.pdl = pdl
        self._products = Products(self.launcher, make_blas(device.stream), pdl, folds_routers)
        self._sampling: SamplingBuffers | None = None
        self._attention_scratch = self._router_scratch = 0
        self._fresh: FreshHeads | None = None  # of the layer whose attention comes next
        self._rule = RouterRule(0)  # of the router whose mixture comes next

    def row_bytes(self, type_id: int, columns: int) -> int:
        return planar_row_bytes(type_id, columns)

    def lay_out(self, type_id: int, n_rows: int, columns: int, raw: int, target: int) -> None:
        repack(self.launcher, type_id, columns, n_rows, raw, target)

    def matrix(self, type_id: int, rows: int, columns: int, experts: int, address: int) -> GpuMatrix:
        return GpuMatrix(type_id, rows, columns, address, experts)

    def compile_ahead(self, enqueue: Callable[[], None]) -> None:
        if isinstance(self.launcher, Launcher):
            with self.launcher.only_recording():
                enqueue()

    def load_compiled(self) -> None:
        if isinstance(self.launcher, Launcher):
            self.launcher.load_compiled()

    def _scratch_parts(self, oplist: OpList, max_tokens: int, max_outputs: int) -> tuple[int, int, int]:
        """Bytes for decode attention, the router and matrices; each keeps its own, because some counters persist."""
        rows = min(max_tokens, max_outputs)
        shapes = attention_heads(oplist)
        sizes = (attention.decode_workspace_bytes(self.launcher, heads, rows) for heads in shapes)
        attended = max(sizes, default=0)
        routers = (RouterInts(*op.ints) for op in oplist.ops if op.kind == OpKind.ROUTER)
        routed = max((router.workspace_bytes(max_tokens, ints.n_experts) for ints in routers), default=0)
        return (
            aligned(attended),
            aligned(routed),
            aligned(self._products.scratch_bytes(oplist, max_tokens, max_outputs)),
        )

    def scratch_bytes(self, oplist: OpList, max_tokens: int, max_outputs: int) -> int:
        return sum(self._scratch_parts(oplist, max_tokens, max_outputs))

    def prepare(
        self,
        oplist: OpList,
        max_tokens: int,
        max_outputs: int,
        scratch: int,
        sampling: SamplingBuffers | None,
    ) -> None:
        attended, routed, _ = self._scratch_parts(oplist, max_tokens, max_outputs)
        self._attention_scratch = scratch
        self._router_scratch = scratch + attended
        self._products.use_scratch(scratch + attended + routed)
        self._sampling = sampling

    def _forms(self, rows: int, out: Rows) -> Outputs:
        """What a producer has to write of `out` in a step of so many rows."""
        if not out.codes:
            return Outputs(values=out.values)
        values = out.values if out.values_are_read else 0
        if needs_codes(rows):
            return Outputs(values, 0, out.codes, out.scales, out.sums)
        return Outputs(values, out.halves)

    def receive(self, shape: StepShape) -> None:
        exchange.receive(self.launcher, shape)

    def send(self, shape: StepShape) -> None:
        if shape.sampling == "none" or self._sampling is None or not shape.n_outputs:
            return
        name = "tokens" if shape.sampling == "greedy" else "sampled"
        target, answers = getattr(shape.mailbox, name), self._sampling.address_of[name]
        exchange.send(self.launcher, answers, target, shape.sampling, shape.n_outputs, pdl=self.pdl)

    def embed(self, shape: StepShape, table: RowTable, out: Rows, scale: float) -> None:
        rows = FileRows(table.type_id, table.address, table.row_bytes, table.columns)
        ops.embed(
            self.launcher, rows, shape.inputs.token_ids, shape.n_tokens, scale, out.values, pdl=self.pdl
        )

    def rms_norm(
        self, rows: int, source: Rows, weight: int, out: Rows, eps: float, add: bool, shape: StepShape
    ) -> None:
        if out.norm and reads_before_norm(out.norm, rows):
            return
        forms = Outputs(values=out.values) if add else self._forms(rows, out)
        ops.rms_norm(
            self.launcher, source.values, weight, rows, source.width, eps, forms, accumulate=add, pdl=self.pdl
        )

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
        shape: StepShape,
    ) -> None:
        self._products.linear(rows, source, matrices, outs, biases, accumulate, scale, softcap)

    def fold_router(self, matrix: GpuMatrix, router: GpuMatrix, norm: int) -> FoldedRouter | None:
        return self._products.fold_router(matrix, router, norm)

    def derive_weights(self) -> None:
        self._products.derive_weights()

    def routed_linear(
        self,
        source: Rows,
        matrix: GpuMatrix,
        out: Rows,
        folded: FoldedRouter,
        ints: RouterInts,
        scale: float,
        epsilon: float,
    ) -> None:
        self._rule = self._products.routed_linear(
            source, matrix, out, folded, ints.gating, bool(ints.normalizes), scale, epsilon
        )

    def rope_store(
        self,
        shape: StepShape,
        query: Rows,
        key: Rows,
        value: Rows,
        q_norm: int,
        k_norm: int,
        frequencies: int,
        ints: RopeStoreInts,
        floats: tuple[float, ...],
        cache: KvLayerArrays,
    ) -> None:
        eps, magnitude = floats
        rope = Rope(q_norm, k_norm, frequencies, ints.rope_dim, ints.rope_style, eps, magnitude)
        if shape.is_decode:  # decode attention does it, which saves a launch
            self._fresh = FreshHeads(rope, key.values, value.values)
            return
        attention.rope_store(
            self.launcher,
            query.values,
            key.values,
            value.values,
            shape.n_tokens,
            Heads.of(ints),
            rope,
            _pointers(cache),
            _step(shape),
            pdl=self.pdl,
        )

    def attention(
        self,
        shape: StepShape,
        query: Rows,
        out: Rows,
        ints: AttentionInts,
        floats: tuple[float, ...],
        cache: KvLayerArrays,
    ) -> None:
        scale, cap = floats
        heads, scores = Heads.of(ints), Scores(scale, cap, ints.window_tokens)
        forms = self._forms(shape.n_tokens, out)
        if shape.is_decode:
            self._decode_attention(shape, query, heads, scores, forms, cache)
            return
        wanted = Outputs(values=out.values) if forms.codes else forms
        attention.prefill_attention(
            self.launcher,
            query.values,
            shape.inputs.tiles,
            shape.n_tiles,
            heads,
            _pointers(cache),
            _step(shape),
            scores,
            wanted,
            pdl=self.pdl,
        )
        if forms.codes:  # so few rows that the matrices after it read codes
            ops.convert(self.launcher, out.values, shape.n_tokens, out.width, forms, pdl=self.pdl)

    def _decode_attention(
        self,
        shape: StepShape,
        query: Rows,
        heads: Heads,
        scores: Scores,
        forms: Outputs,
        cache: KvLayerArrays,
    ) -> None:
        seen = min(shape.context_limit, scores.window or shape.context_limit)
        plan = attention.plan_decode(self.launcher, heads, shape.n_tokens, seen)
        attention.decode_attention(
            self.launcher,
            query.values,
            shape.n_tokens,
            heads,
            _pointers(cache),
            _step(shape),
            scores,
            plan,
            self._attention_scratch,
            forms,
            fresh=self._fresh,
            pdl=self.pdl,
        )

    def glu(self, rows: int, gate: Rows, up: Rows, out: Rows, activation: int, shape: StepShape) -> None:
        forms = self._forms(rows, out)
        ops.glu(self.launcher, gate.values, up.values, rows, gate.width, activation, forms, pdl=self.pdl)

    def router(
        self,
        shape: StepShape,
        source: Rows,
        matrix: GpuMatrix,
        bias: int,
        ids: Rows,
        weights: Rows,
        ints: RouterInts,
        scale: float,
    ) -> None:
        rows, (n_experts, n_used, gating, normalize) = shape.n_tokens, ints
        if source.norm and reads_before_norm(source.norm, rows):
            self._rule = self._products.router_logits(rows, source, matrix, bias, gating, normalize, scale)
            return
        settings = Router(
            matrix.pointer,
            matrix.type_id == _F16,
            bias,
            n_experts,
            n_used,
            matrix.cols,
            gating,
            bool(normalize),
            scale,
        )
        router.route(
            self.launcher,
            settings,
            source.values,
            shape.n_tokens,
            ids.values,
            weights.values,
            self._router_scratch,
            pdl=self.pdl,
        )

    def moe(
        self,
        shape: StepShape,
        source: Rows,
        ids: Rows,
        weights: Rows,
        stacks: tuple[GpuMatrix, GpuMatrix, GpuMatrix],
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None:
        rows, rest = shape.n_tokens, (ids, weights, stacks, out, activation, accumulate)
        if source.norm and reads_before_norm(source.norm, rows):
            self._products.routed_moe(rows, source, self._rule, *rest)
            return
        self._products.moe(rows, source, *rest)

    def takes_network(self, rows: int, matrices: tuple[GpuMatrix, GpuMatrix, GpuMatrix]) -> bool:
        return self._products.takes_network(rows, matrices)

    def network(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[GpuMatrix, GpuMatrix, GpuMatrix],
        hidden: Rows,
        out: Rows,
        activation: int,
        accumulate: bool,
        shape: StepShape,
    ) -> None:
        self._products.network(rows, source, matrices, hidden, out, activation, accumulate)

    def move_pages(self, host: HostLayer, layer: KvLayerArrays, pages: PageList, to: Side) -> None:
        kv_pages.move_pages(self.launcher, host, layer, pages, to)

    def select(self, shape: StepShape, source: Rows, out: Rows) -> None:
        ops.select_rows(
            self.launcher,
            source.values,
            shape.inputs.output_rows,
            shape.n_outputs,
            source.width,
            out.values,
            pdl=self.pdl,
        )

    def sample(self, shape: StepShape, logits: Rows, n_vocab: int) -> None:
        sampling = self._sampling
        if shape.sampling == "none" or sampling is None or not shape.n_outputs:
            return
        places = sampling.address_of
        if shape.sampling == "greedy":
            sampler.greedy(
                self.launcher,
                logits.values,
                shape.n_outputs,
                n_vocab,
                places["tokens"],
                sampling.workspace,
                pdl=self.pdl,
            )
            return
        sampler.sample(
            self.launcher,
            logits.values,
            shape.n_outputs,
            n_vocab,
            shape.inputs.samplers,
            shape.mailbox.history,
            shape.mailbox.bias_ids,
            shape.mailbox.bias_values,
            places["sampled"],
            places["tokens"],
            sampling.workspace,
            pdl=self.pdl,
        )


def _pointers(cache: KvLayerArrays) -> KvPointers:
    return KvPointers(cache.keys, cache.values, cache.key_scales, cache.value_scales)


def _step(shape: StepShape) -> StepPointers:
    inputs = shape.inputs
    return StepPointers(inputs.positions, inputs.sequence_of_token, inputs.page_tables, inputs.max_pages)
