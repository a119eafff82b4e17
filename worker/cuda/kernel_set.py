"""The calls that lowering makes, one per kind of op: the seam between the op list and the CUDA kernels.

`cuda_kernels.py` has the real ones. Tests put numpy behind the same seam, so lowering, graphs and the executor are
checked against the reference without a GPU. Both derive from KernelSet, so that mypy compares their signatures with
those here. Every call queues work on the device's compute stream and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from worker.cuda.kv_cache import KvLayerArrays
from worker.cuda.kv_pages import HostLayer, PageList, Side
from worker.cuda.values import Rows, RowTable, StepShape
from worker.ops.oplist import AttentionInts, OpList, RopeStoreInts, RouterInts

Matrix = Any  # a matrix as the kernels laid it out; made by KernelSet.matrix


class KernelSet(Protocol):
    """Definitions of the ops: worker/cpu/pw_cpu.h (pw_op_kind) and worker/ops/reference.py."""

    def row_bytes(self, type_id: int, columns: int) -> int:
        """Device bytes of one laid-out row. Raises EngineStartError for a type without kernels."""
        ...

    def lay_out(self, type_id: int, n_rows: int, columns: int, raw: int, target: int) -> None:
        """From file rows at `raw` to the kernels' rows at `target`."""
        ...

    def matrix(self, type_id: int, rows: int, columns: int, experts: int, address: int) -> Matrix:
        """A handle on experts * rows laid-out rows at `address`."""
        ...

    def compile_ahead(self, enqueue: Callable[[], None]) -> None:
        """Begin to compile what `enqueue` would launch, without launching it."""
        ...

    def load_compiled(self) -> None:
        """Wait for what was compiled ahead and load it."""
        ...

    def scratch_bytes(self, oplist: OpList, max_tokens: int, max_outputs: int) -> int:
        """Zeroed bytes that `prepare` wants for steps of that size."""
        ...

    def prepare(self, oplist: OpList, max_tokens: int, max_outputs: int, scratch: int, sampling: Any) -> None:
        """Take the scratch; called once, after the weights are laid out. `sampling`: SamplingBuffers or None."""
        ...

    def receive(self, shape: StepShape) -> None:
        """Begin a decode step: take what the host left in `shape.mailbox`."""
        ...

    def send(self, shape: StepShape) -> None:
        """End a step: leave the answers in `shape.mailbox`."""
        ...

    def embed(self, shape: StepShape, table: RowTable, out: Rows, scale: float) -> None: ...

    def rms_norm(
        self, rows: int, source: Rows, weight: int, out: Rows, eps: float, add: bool, shape: StepShape
    ) -> None:
        """Also fills the form of `out` that matrices will want in a step of this shape. May do nothing for one row
        where `out.norm` says that its readers can do without."""
        ...

    def linear(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[Matrix, ...],
        outs: tuple[Rows, ...],
        biases: tuple[int, ...],
        accumulate: bool,
        scale: float,
        softcap: float,
        shape: StepShape,
    ) -> None: ...

    def fold_router(self, matrix: Matrix, router: Matrix, norm: int) -> Any:
        """What `routed_linear` needs of a router of norm(r + matrix a); None where it stays alone. Only addresses:
        the weights may still be on their way."""
        ...

    def derive_weights(self) -> None:
        """Once all weights are there: compute what `fold_router` has promised."""
        ...

    def routed_linear(
        self,
        source: Rows,
        matrix: Matrix,
        out: Rows,
        folded: Any,
        ints: RouterInts,
        scale: float,
        epsilon: float,
    ) -> None:
        """For one row: an accumulating `linear`, and the router of the mixture that comes next, which writes `out`;
        until then `out` does not have the sum. `ints` and `scale` are the router's, `epsilon` the norm's."""
        ...

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
        """`ints` and `floats` are the op's own."""
        ...

    def attention(
        self,
        shape: StepShape,
        query: Rows,
        out: Rows,
        ints: AttentionInts,
        floats: tuple[float, ...],
        cache: KvLayerArrays,
    ) -> None: ...

    def glu(self, rows: int, gate: Rows, up: Rows, out: Rows, activation: int, shape: StepShape) -> None: ...

    def router(
        self,
        shape: StepShape,
        source: Rows,
        matrix: Matrix,
        bias: int,
        ids: Rows,
        weights: Rows,
        ints: RouterInts,
        scale: float,
    ) -> None: ...

    def moe(
        self,
        shape: StepShape,
        source: Rows,
        ids: Rows,
        weights: Rows,
        stacks: tuple[Matrix, Matrix, Matrix],
        out: Rows,
        activation: int,
        accumulate: bool,
    ) -> None: ...

    def takes_network(self, rows: int, matrices: tuple[Matrix, Matrix, Matrix]) -> bool:
        """Whether `network` stands for gate and up, gated product and down in a step of so many rows."""
        ...

    def network(
        self,
        rows: int,
        source: Rows,
        matrices: tuple[Matrix, Matrix, Matrix],
        hidden: Rows,
        out: Rows,
        activation: int,
        accumulate: bool,
        shape: StepShape,
    ) -> None:
        """out (+)= down (act(gate x) * up x); `hidden` is room for what is between."""
        ...

    def move_pages(self, host: HostLayer, layer: KvLayerArrays, pages: PageList, to: Side) -> None:
        """Copy pages of a layer that passes through, between the CPU's cache and the device's."""
        ...

    def select(self, shape: StepShape, source: Rows, out: Rows) -> None: ...

    def sample(self, shape: StepShape, logits: Rows, n_vocab: int) -> None: ...
