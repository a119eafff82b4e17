"""Mixtures for 2 to 32 tokens: vector arithmetic as for one token, but an expert's weights come from memory once for
all tokens that chose it.

    norm_and_route    norm and router in one launch, which writes logits, and the 8-bit codes that the experts read
    moe_few_vectors   the experts in two launches: gate, up and activation; down and the sum

Given logits, each of the two launches of `moe_few_vectors` chooses the experts by itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_uint64

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.few import FEW_TOKENS
from worker.cuda.formats import GpuMatrix, is_float
from worker.cuda.fusion import MOST_CHOSEN
from worker.cuda.matmul import Activations, Norm, token_bytes
from worker.cuda.matmul_moe import (
    Chosen,
    Experts,
    HiddenStruct,
    RouterRule,
    RouterStruct,
    expert_defines,
    fine_token_bytes,
    hidden_struct,
    router_struct,
)

_GROUP = 16  # rows that share a scale between the kernels
_DRIVER_BYTES = 1024  # of shared memory, for each block
_MOST_STAGES = 4
_ROUTER_WARPS = 8

# (warps of a block, rows of a warp, rows of a stage), best first; the later ones are for less shared memory.
_Shapes = tuple[tuple[int, int, int], ...]
_GATE_UP_SHAPES: _Shapes = ((16, 2, 2), (16, 2, 1), (16, 1, 1), (8, 2, 2), (4, 4, 4))
_DOWN_SHAPES: _Shapes = ((16, 2, 2), (12, 2, 2), (8, 2, 2), (4, 2, 2), (4, 1, 1))
_DOWN_TOKENS = (2, 1)  # of a block, which keeps the hidden values of all their experts


class _GateUpStruct(ctypes.Structure):
    _fields_ = [
        ("router", RouterStruct),
        ("gate", c_uint64),
        ("up", c_uint64),
        ("gate_expert_bytes", c_uint64),
        ("up_expert_bytes", c_uint64),
        ("hidden", HiddenStruct),
        ("codes", c_uint64),
        ("scales", c_uint64),
        ("sums", c_uint64),
        ("n_tokens", c_int),
    ]


class _DownStruct(ctypes.Structure):
    _fields_ = [
        ("router", RouterStruct),
        ("down", c_uint64),
        ("expert_bytes", c_uint64),
        ("hidden", HiddenStruct),
        ("residual", c_uint64),
        ("output", c_uint64),
        ("output_stride", c_int),
        ("n_tokens", c_int),
    ]


class Cut(msgspec.Struct, frozen=True):
    """How a kernel is cut, in the words of its definitions."""

    tokens: int
    warps: int
    stages: int
    rows: int
    stage_rows: int
    together: int
    shared_bytes: int


def _capacity(n_tokens: int) -> int:
    """Kernels are compiled for powers of two."""
    return 1 << (n_tokens - 1).bit_length()


def _together(tokens: int) -> int:
    """Tokens that share what unpacking a row costs: about as many as want the same expert."""
    return 2 if tokens <= 16 else 4


def _fitting(
    launcher: Launcher,
    experts: Experts,
    tokens: int,
    together: int,
    shapes: _Shapes,
    row_bytes: int,
    other_bytes: Callable[[int, int], int],
) -> Cut | None:
    """The first shape with room for a stage more than it works on; `other_bytes`: by warps and rows, without stages."""
    most_chosen, slots = min(experts.gate.experts, tokens * experts.n_used), tokens * experts.n_used
    for warps, rows, stage_rows in shapes:
        static = (
            4 * experts.gate.experts + 2 * most_chosen + 6 * slots + 8 * warps * _MOST_STAGES + _DRIVER_BYTES
        )
        other, stage = other_bytes(warps, rows), warps * stage_rows * row_bytes
        stages = min(_MOST_STAGES, (launcher.shared_bytes - static - other) // stage)
        if stages > rows // stage_rows:
            return Cut(tokens, warps, stages, rows, stage_rows, together, other + stages * stage)
    return None


def _same(other_bytes: int, warps: int, rows: int) -> int:
    return other_bytes


def _gate_up_cut(launcher: Launcher, experts: Experts, n_tokens: int) -> Cut | None:
    tokens = _capacity(n_tokens)
    inputs, together = tokens * token_bytes(experts.gate.cols, False), _together(tokens)
    return _fitting(
        launcher,
        experts,
        tokens,
        together,
        _GATE_UP_SHAPES,
        experts.gate.row_bytes + experts.up.row_bytes,
        lambda warps, rows: inputs + 8 * warps * rows * (tokens + together),
    )


def _down_cut(launcher: Launcher, experts: Experts, n_tokens: int) -> Cut | None:
    row_bytes, slot_bytes = experts.n_used * experts.down.row_bytes, fine_token_bytes(experts.down.cols)
    for most in _DOWN_TOKENS:
        tokens = min(most, _capacity(n_tokens))
        inputs = tokens * experts.n_used * slot_bytes
        cut = _fitting(
            launcher,
            experts,
            tokens,
            1,
            _DOWN_SHAPES,
            row_bytes,
            functools.partial(_same, inputs),
        )
        if cut is not None:
            return cut
    return None


def takes_few(launcher: Launcher, experts: Experts, n_tokens: int) -> bool:
    """Whether `moe_few_vectors` can do a mixture for so many tokens."""
    matrices = (experts.gate, experts.up, experts.down)
    if not 2 <= n_tokens <= FEW_TOKENS or experts.gate.experts == 1 or experts.n_used > MOST_CHOSEN:
        return False
    if any(is_float(matrix.type_id) for matrix in matrices) or experts.gate.rows % _GROUP:
        return False
    cuts = (_gate_up_cut(launcher, experts, n_tokens), _down_cut(launcher, experts, n_tokens))
    return None not in cuts


def moe_few_vectors(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    hidden: int,
    output: int,
    *,
    accumulate: bool,
    pdl: bool = True,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= the mixture of `source` (codes); `hidden` is scratch of
    hidden_bytes. Logits of `choice` are [n_tokens, experts]."""
    _gate_up(launcher, experts, choice, source, n_tokens, hidden, pdl)
    _down(launcher, experts, choice, n_tokens, hidden, output, accumulate, pdl)


def _gate_up(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    hidden: int,
    pdl: bool,
) -> None:
    cut = _gate_up_cut(launcher, experts, n_tokens)
    assert cut is not None
    defines = expert_defines(experts.gate, experts, choice, cut.tokens, cut) | {
        "TOGETHER": cut.together,
        "TYPE_1": experts.up.type_id,
        "ACTIVATION": experts.activation,
        "STAGE_ROWS": cut.stage_rows,
    }
    function = launcher.function("few_gate_up.cu", "few_gate_up", defines)
    call = _GateUpStruct(
        router=router_struct(choice),
        gate=experts.gate.pointer,
        up=experts.up.pointer,
        gate_expert_bytes=experts.gate.expert_bytes,
        up_expert_bytes=experts.up.expert_bytes,
        hidden=hidden_struct(experts, n_tokens, hidden),
        codes=source.codes,
        scales=source.scales,
        sums=source.sums,
        n_tokens=n_tokens,
    )
    most_chosen = min(n_tokens * experts.n_used, experts.gate.experts)
    grid = min(launcher.sm_count, most_chosen * -(-experts.gate.rows // (cut.warps * cut.rows)))
    launcher.launch(function, grid, cut.warps * 32, cut.shared_bytes, (call,), pdl)


def _down(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    n_tokens: int,
    hidden: int,
    output: int,
    accumulate: bool,
    pdl: bool,
) -> None:
    cut = _down_cut(launcher, experts, n_tokens)
    assert cut is not None
    defines = expert_defines(experts.down, experts, choice, cut.tokens, cut)
    function = launcher.function("few_down.cu", "few_down", defines)
    call = _DownStruct(
        router=router_struct(choice),
        down=experts.down.pointer,
        expert_bytes=experts.down.expert_bytes,
        hidden=hidden_struct(experts, n_tokens, hidden),
        residual=output if accumulate else 0,
        output=output,
        output_stride=experts.down.rows,
        n_tokens=n_tokens,
    )
    groups, most = -(-n_tokens // cut.tokens), -(-experts.down.rows // cut.rows)
    grid = (min(max(1, launcher.sm_count // groups), most), groups)
    launcher.launch(function, grid, cut.warps * 32, cut.shared_bytes, (call,), pdl)


def norm_and_route(
    launcher: Launcher,
    matrix: GpuMatrix,
    values: int,
    norm: Norm,
    n_tokens: int,
    logits: int,
    normed: Activations,
    pdl: bool = True,
) -> None:
    """Enqueue logits f32 [n_tokens, rows] of values f32 [n_tokens, cols] behind a norm, and the codes of `normed`; a
    float matrix, cols % 32 == 0."""
    tokens = 1 if n_tokens <= 16 else 4  # of a block
    defines = {
        "COLS": matrix.cols,
        "WEIGHT_TYPE": matrix.type_id,
        "TOKENS": tokens,
        "WARPS": _ROUTER_WARPS,
    }
    function = launcher.function("few_router.cu", "few_router", defines)
    sizes = (c_float(norm.epsilon), c_int(matrix.rows), c_int(n_tokens))
    args = (matrix.pointer, norm.weights, values, logits, *sizes, normed.codes, normed.scales, normed.sums)
    grid = (-(-matrix.rows // _ROUTER_WARPS) + 1, -(-n_tokens // tokens))
    launcher.launch(function, grid, _ROUTER_WARPS * 32, 0, args, pdl)
