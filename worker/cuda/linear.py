"""The matrix products an executor calls: picks the kernel for the number of tokens.

    linear(launcher, parts, source, n_tokens, ...)  y_j (+)= W_j x for up to three matrices of one input
    moe(launcher, experts, choice, source, ...)     y (+)= the mixture of experts, or, for few tokens, a dense network

Up to VECTOR_TOKENS tokens run on matrix-vector kernels, up to FEW_TOKENS on tensor cores as fast as weights arrive, a
mixture on vector kernels of its own, all with 8-bit activations: `source.codes`, or made of `source.values` (f32) where
there are none. More tokens are multiplied as halves (`source.halves`, or made of the values): in the kernel up to
CUBLAS_TOKENS, from there on dense matrices by cuBLAS. Float weights always want values or halves. Above VECTOR_TOKENS
products need `workspace`: a 256-byte aligned address with `linear_workspace_bytes` or `moe_workspace_bytes` of memory,
which nothing else uses while they run.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.cuda.driver import Launcher
from worker.cuda.few import FEW_TOKENS, few_cut, moe_few, multiply_few, multiply_gated, takes_mixture
from worker.cuda.formats import is_float
from worker.cuda.grouped import moe_grouped
from worker.cuda.grouped import workspace as grouped_workspace
from worker.cuda.matmul import (
    GEMV_TOKENS,
    STORE,
    Activations,
    Epilogue,
    Norm,
    Part,
    gemv,
    quantise,
    rows_from,
)
from worker.cuda.matmul_few_moe import moe_few_vectors, takes_few
from worker.cuda.matmul_moe import DENSE, Chosen, Experts, RouterRule, hidden_bytes, moe_decode
from worker.cuda.memory import aligned
from worker.cuda.prefill import (
    CUBLAS_TOKENS,
    Blas,
    can_use_tensor_cores,
    matrix_halves_bytes,
    multiply_in_kernel,
    multiply_with_blas,
    to_halves,
)

# Up to here vector arithmetic is faster than tensor cores, for a dense network as three products.
VECTOR_TOKENS = NETWORK_VECTOR_TOKENS = 4
# So many tokens, too, for matrices that are in flight at once.
WIDE_VECTORS, WIDE_MOST_WEIGHTS = (8, 16), 12 << 20


def needs_codes(n_tokens: int) -> bool:
    """Whether a product of n_tokens tokens reads 8-bit codes, so that its producer should write them."""
    return n_tokens <= FEW_TOKENS


def linear_workspace_bytes(parts: Sequence[Part], n_tokens: int) -> int:
    """Scratch of `linear`: halves or codes of the activations, and halves of one matrix at a time."""
    if n_tokens <= VECTOR_TOKENS:
        return 0
    halves = aligned(n_tokens * parts[0].matrix.cols * 2)
    if n_tokens < CUBLAS_TOKENS:
        return halves
    return halves + max(aligned(matrix_halves_bytes(part.matrix)) for part in parts)


def linear(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    *,
    norm: Norm | None = None,
    epilogue: Epilogue = STORE,
    blas: Blas | None = None,
    workspace: int = 0,
    pdl: bool = True,
) -> None:
    """Enqueue output_j f32 [n_tokens, stride] (+)= W_j x. `norm` (weights and epsilon, applied to source.values in
    the kernel) is for at most VECTOR_TOKENS tokens."""
    tensor_cores = all(can_use_tensor_cores(part.matrix) for part in parts)
    if _takes_vectors(parts, n_tokens) or not tensor_cores:
        _gemv_pieces(launcher, parts, source, n_tokens, norm, epilogue, pdl)
        return
    assert norm is None and workspace
    cols = parts[0].matrix.cols
    if n_tokens <= FEW_TOKENS:
        _linear_few(launcher, parts, source, n_tokens, epilogue, workspace, pdl)
        return
    halves = _halves(launcher, source, n_tokens * cols, workspace)
    for part in parts:
        if n_tokens >= CUBLAS_TOKENS and blas is not None:
            scratch = workspace + aligned(n_tokens * cols * 2)
            multiply_with_blas(launcher, blas, part, halves, n_tokens, epilogue, scratch)
        else:
            multiply_in_kernel(launcher, part, halves, n_tokens, epilogue)


def _takes_vectors(parts: Sequence[Part], n_tokens: int) -> bool:
    """Above VECTOR_TOKENS only numbers of tokens that are decoded all the time: each wants kernels of its own."""
    if n_tokens <= VECTOR_TOKENS:
        return True
    if n_tokens not in WIDE_VECTORS or any(is_float(part.matrix.type_id) for part in parts):
        return False
    return parts[0].matrix.cols * sum(part.matrix.rows for part in parts) <= WIDE_MOST_WEIGHTS


def _linear_few(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    epilogue: Epilogue,
    workspace: int,
    pdl: bool,
) -> None:
    """Float and quantised matrices take different activations, and so go separately."""
    cols = parts[0].matrix.cols
    floats = [part for part in parts if is_float(part.matrix.type_id)]
    if floats:
        halves = _halves(launcher, source, n_tokens * cols, workspace)
        if not multiply_few(launcher, floats, Activations(0, halves=halves), n_tokens, epilogue, pdl):
            raise AssertionError("float rows of whole eights fit")
    quantised = [part for part in parts if not is_float(part.matrix.type_id)]
    if quantised:
        codes = _codes(launcher, source, n_tokens, cols, workspace, pdl)
        if not multiply_few(launcher, quantised, codes, n_tokens, epilogue, pdl):
            raise AssertionError("quantised rows fit")


def code_buffer(address: int, n_tokens: int, cols: int) -> Activations:
    """Codes, scales and sums of [n_tokens, cols] at one address: 5 / 4 * n_tokens * cols bytes."""
    n = n_tokens * cols
    return Activations(0, address, address + n, address + n + n // 8)


def _codes(
    launcher: Launcher, source: Activations, n_tokens: int, cols: int, workspace: int, pdl: bool
) -> Activations:
    """The 8-bit activations, after making them in `workspace` if no kernel in front did."""
    if source.codes:
        return source
    assert source.values
    target = code_buffer(workspace, n_tokens, cols)
    quantise(launcher, source.values, n_tokens, cols, target, pdl)
    return target


def _halves(launcher: Launcher, source: Activations, n: int, workspace: int) -> int:
    """Where the f16 activations are, after making them in `workspace` if no kernel in front did."""
    if source.halves:
        return source.halves
    assert source.values
    to_halves(launcher, source.values, workspace, n)
    return workspace


def _gemv_pieces(
    launcher: Launcher,
    parts: Sequence[Part],
    source: Activations,
    n_tokens: int,
    norm: Norm | None,
    epilogue: Epilogue,
    pdl: bool,
) -> None:
    """Even pieces of at most GEMV_TOKENS tokens."""
    n_pieces = -(-n_tokens // GEMV_TOKENS)
    start = 0
    for piece in range(n_pieces):
        count = (n_tokens - start) // (n_pieces - piece)
        moved = [
            Part(part.matrix, part.output + start * part.output_stride * 4, part.output_stride, part.bias)
            for part in parts
        ]
        gemv(
            launcher,
            moved,
            rows_from(source, start, parts[0].matrix.cols),
            count,
            norm=norm,
            epilogue=epilogue,
            pdl=pdl,
        )
        start += count


def _is_for_vectors(experts: Experts, n_tokens: int) -> bool:
    """Whether a mixture runs on the kernels for few tokens, which know quantised weights only."""
    matrices = (experts.gate, experts.up, experts.down)
    return n_tokens <= VECTOR_TOKENS and not any(is_float(matrix.type_id) for matrix in matrices)


def moe_workspace_bytes(experts: Experts, n_tokens: int) -> int:
    """Scratch of `moe`."""
    if n_tokens == 1 and _is_for_vectors(experts, n_tokens):
        return aligned(hidden_bytes(experts, n_tokens))
    if n_tokens <= FEW_TOKENS:
        return max(few_scratch(experts, n_tokens)[-1], grouped_workspace(experts, n_tokens).total_bytes)
    return grouped_workspace(experts, n_tokens).total_bytes


def few_scratch(experts: Experts, n_tokens: int) -> tuple[int, int, int, int]:
    """Where codes of the input, codes of what is between and the experts' rows lie in the scratch of `moe` for few
    tokens, and its size."""
    slots = n_tokens * experts.n_used
    between = aligned(5 * n_tokens * experts.gate.cols // 4)
    rows = between + aligned(max(5 * slots * experts.gate.rows // 4, hidden_bytes(experts, n_tokens)))
    return 0, between, rows, rows + aligned(4 * slots * experts.down.rows)


def moe(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    output: int,
    workspace: int,
    *,
    accumulate: bool,
    norm: Norm | None = None,
    pdl: bool = True,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= the mixture of `source`. `choice` may be a RouterRule for quantised
    experts that `takes_few` accepts or for one token, for which there may be a `norm`, too."""
    if takes_few(launcher, experts, n_tokens):
        assert norm is None
        _moe_vectors(launcher, experts, choice, source, n_tokens, output, workspace, accumulate, pdl)
        return
    if _is_for_vectors(experts, n_tokens):
        moe_decode(
            launcher,
            experts,
            choice,
            source,
            n_tokens,
            workspace,
            output,
            accumulate=accumulate,
            norm=norm,
            pdl=pdl,
        )
        return
    assert isinstance(choice, Chosen) and norm is None
    if takes_mixture(launcher, experts, n_tokens):
        first, between, rows, _ = few_scratch(experts, n_tokens)
        codes = _codes(launcher, source, n_tokens, experts.gate.cols, workspace + first, pdl)
        hidden = code_buffer(workspace + between, n_tokens * experts.n_used, experts.gate.rows)
        moe_few(
            launcher,
            experts,
            choice,
            codes,
            n_tokens,
            output,
            hidden,
            workspace + rows,
            accumulate=accumulate,
            pdl=pdl,
        )
        return
    scratch = grouped_workspace(experts, n_tokens, workspace)
    moe_grouped(launcher, experts, choice, source, n_tokens, output, scratch, accumulate=accumulate)


def _moe_vectors(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    output: int,
    workspace: int,
    accumulate: bool,
    pdl: bool,
) -> None:
    first, between, *_ = few_scratch(experts, n_tokens)
    codes = _codes(launcher, source, n_tokens, experts.gate.cols, workspace + first, pdl)
    hidden = workspace + between
    moe_few_vectors(
        launcher, experts, choice, codes, n_tokens, hidden, output, accumulate=accumulate, pdl=pdl
    )


def takes_network(launcher: Launcher, network: Experts, n_tokens: int) -> bool:
    """Whether `dense_network` can do a network (one expert) for so many tokens."""
    if n_tokens <= 1:
        return n_tokens == 1
    if not NETWORK_VECTOR_TOKENS < n_tokens <= FEW_TOKENS:
        return False
    gated = few_cut(launcher, [network.gate, network.up], n_tokens, 1, is_gated=True)
    return gated is not None and few_cut(launcher, [network.down], n_tokens, 1, is_gated=False) is not None


def dense_network(
    launcher: Launcher,
    network: Experts,
    source: Activations,
    n_tokens: int,
    hidden: int,
    output: int,
    workspace: int,
    *,
    accumulate: bool,
    norm: Norm | None = None,
    pdl: bool = True,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= down (act(gate x) * up x) in two launches, for up to FEW_TOKENS
    tokens. `hidden`: 4 * n_tokens * n_ff bytes; `workspace` as for `linear` of gate and up."""
    if n_tokens == 1:
        moe_decode(
            launcher,
            network,
            DENSE,
            source,
            n_tokens,
            hidden,
            output,
            accumulate=accumulate,
            norm=norm,
            pdl=pdl,
        )
        return
    codes = _codes(launcher, source, n_tokens, network.gate.cols, workspace, pdl)
    between = code_buffer(hidden, n_tokens, network.gate.rows)
    multiply_gated(launcher, network, codes, n_tokens, between, pdl)
    down = [Part(network.down, output, network.down.rows)]
    if not multiply_few(launcher, down, between, n_tokens, Epilogue(accumulate), pdl):
        raise AssertionError("takes_network said yes")
