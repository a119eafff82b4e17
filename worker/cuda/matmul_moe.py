"""Experts of a mixture for a few tokens: two launches, one for gate, up and activation, one for down and the sum.

The experts come as ids and weights on the device (`Chosen`), or, for one token, as router logits from which both
kernels find them without a launch of their own (`RouterRule`). More tokens go to `grouped.py`, where tokens of one
expert share its weights.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64
from typing import Protocol

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.formats import GpuMatrix
from worker.cuda.matmul import Activations, Norm, Tiling, choose_tiling, rows_from, token_bytes

_QUANTISED, _PLAIN, _NORMED = 0, 1, 2
_HIDDEN_GROUP = 16  # rows that share a scale between the two kernels


class Experts(msgspec.Struct, frozen=True):
    """gate and up [experts, n_ff, n_embd], down [experts, n_embd, n_ff]; activation 0 silu, 1 gelu (tanh).

    A dense network is one expert of which one is used, with DENSE for the choice.
    """

    gate: GpuMatrix
    up: GpuMatrix
    down: GpuMatrix
    n_used: int
    activation: int = 0


class Chosen(msgspec.Struct, frozen=True):
    """Experts found by a kernel before: ids i32 and weights f32, both [tokens, n_used]."""

    ids: int
    weights: int


DENSE = Chosen(0, 0)


class RouterRule(msgspec.Struct, frozen=True):
    """Experts still to be chosen, for one token: logits f32 [experts], bias f32 [experts] or 0. `residual`: with a
    folded router (no bias then) the row f32 [n_embd] by whose rms the logits are not divided yet, else 0."""

    logits: int
    bias: int = 0
    is_sigmoid: bool = False
    normalize: bool = True
    weights_scale: float = 1.0
    residual: int = 0
    epsilon: float = 0.0


class _RuleStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_uint64),
        ("residual", c_uint64),
        ("bias", c_uint64),
        ("epsilon", c_float),
        ("weights_scale", c_float),
    ]


class RouterStruct(ctypes.Structure):
    _fields_ = [("ids", c_uint64), ("weights", c_uint64), ("rule", _RuleStruct)]


class HiddenStruct(ctypes.Structure):
    _fields_ = [("codes", c_uint64), ("scales", c_uint64), ("sums", c_uint64)]


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
        ("values", c_uint64),
        ("norm", c_uint64),
        ("norm_epsilon", c_float),
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
    ]


def most_tiles(experts: Experts, n_tokens: int, tile_tokens: int) -> int:
    """How many tiles of so many slots (token, k) of one expert there can be, however tokens choose."""
    slots = n_tokens * experts.n_used
    return min(slots, experts.gate.experts + slots // tile_tokens)


def hidden_bytes(experts: Experts, n_tokens: int) -> int:
    """Size of the `hidden` buffer of `moe_decode`."""
    count = n_tokens * experts.n_used * experts.gate.rows
    return count + 2 * 4 * (count // _HIDDEN_GROUP)


def hidden_struct(experts: Experts, n_tokens: int, hidden: int) -> HiddenStruct:
    count = n_tokens * experts.n_used * experts.gate.rows
    scales = hidden + count
    return HiddenStruct(hidden, scales, scales + 4 * (count // _HIDDEN_GROUP))


def moe_decode(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    hidden: int,
    output: int,
    *,
    accumulate: bool,
    norm: Norm | None = None,
    pdl: bool = True,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= the mixture of `source`; `hidden` is scratch of hidden_bytes.

    With a folded router the output is not read: the sum is added to `choice.residual`.
    Types must be quantised. The first of the two kernels hesitates to start early in a mixture: until the router has
    spoken it has nothing to fetch, and its blocks take room.
    """
    assert n_tokens == 1 or isinstance(choice, Chosen)
    if not _fits(launcher, experts, n_tokens):
        assert isinstance(choice, Chosen) and n_tokens > 1, "an expert does not fit into shared memory"
        _halves(launcher, experts, choice, source, n_tokens, hidden, output, accumulate, pdl)
        return
    _gate_up(launcher, experts, choice, source, n_tokens, hidden, norm, pdl)
    _down(launcher, experts, choice, n_tokens, hidden, output, accumulate, pdl)


def _halves(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen,
    source: Activations,
    n_tokens: int,
    hidden: int,
    output: int,
    accumulate: bool,
    pdl: bool,
) -> None:
    first = n_tokens // 2
    for start, count in ((0, first), (first, n_tokens - first)):
        moe_decode(
            launcher,
            experts,
            _from_token(choice, start * experts.n_used),
            rows_from(source, start, experts.gate.cols),
            count,
            hidden + hidden_bytes(experts, start),
            output + start * experts.down.rows * 4,
            accumulate=accumulate,
            pdl=pdl,
        )


def _from_token(choice: Chosen, slot: int) -> Chosen:
    return choice if choice == DENSE else Chosen(choice.ids + slot * 4, choice.weights + slot * 4)


def _fits(launcher: Launcher, experts: Experts, n_tokens: int) -> bool:
    return (
        _gate_up_tiling(launcher, experts, n_tokens) is not None
        and _down_tiling(launcher, experts, n_tokens) is not None
    )


def _gate_up_tiling(launcher: Launcher, experts: Experts, n_tokens: int) -> Tiling | None:
    row_bytes = experts.gate.row_bytes + experts.up.row_bytes
    n_rows = n_tokens * experts.n_used * experts.gate.rows
    activation_bytes = n_tokens * token_bytes(experts.gate.cols, False)
    return choose_tiling(
        launcher, n_rows, row_bytes, activation_bytes, 1, n_tokens, warps_divide=_HIDDEN_GROUP
    )


def _down_tiling(launcher: Launcher, experts: Experts, n_tokens: int) -> Tiling | None:
    row_bytes = experts.n_used * experts.down.row_bytes
    activation_bytes = n_tokens * experts.n_used * fine_token_bytes(experts.down.cols)
    return choose_tiling(launcher, n_tokens * experts.down.rows, row_bytes, activation_bytes, 1, n_tokens)


def fine_token_bytes(cols: int) -> int:
    """Shared memory of one token's activations with a scale per 16 columns (activations.cuh)."""
    return -(-(-(-cols // 64) * 88) // 16) * 16


def _rounds(experts: Experts, n_tokens: int, tiling: Tiling) -> int:
    """Tiles of a block of the first kernel."""
    tile = max(_HIDDEN_GROUP, tiling.warps * tiling.rows)
    return -(-n_tokens * experts.n_used * -(-experts.gate.rows // tile) // tiling.blocks)


class Ring(Protocol):
    """How a block of a kernel is cut, as far as kernels of experts share it."""

    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def rows(self) -> int: ...


def expert_defines(
    matrix: GpuMatrix, experts: Experts, choice: Chosen | RouterRule, n_tokens: int, ring: Ring
) -> dict[str, int | float | str]:
    """What all kernels of experts by vector arithmetic are told (moe.cuh)."""
    defines: dict[str, int | float | str] = {
        "COLS": matrix.cols,
        "MATRIX_ROWS": matrix.rows,
        "TYPE_0": matrix.type_id,
        "TOKENS": n_tokens,
        "N_EXPERTS": experts.gate.experts,
        "N_USED": experts.n_used,
        "WARPS": ring.warps,
        "STAGES": ring.stages,
        "ROWS": ring.rows,
        "CHOOSE": int(isinstance(choice, RouterRule)),
    }
    if isinstance(choice, RouterRule):
        defines |= {
            "SIGMOID": int(choice.is_sigmoid),
            "BIASED": int(choice.bias != 0),
            "NORMALISED": int(choice.normalize),
        }
    return defines


def router_struct(choice: Chosen | RouterRule) -> RouterStruct:
    if isinstance(choice, Chosen):
        return RouterStruct(ids=choice.ids, weights=choice.weights)
    rule = _RuleStruct(choice.logits, choice.residual, choice.bias, choice.epsilon, choice.weights_scale)
    return RouterStruct(rule=rule)


def router_logits(
    launcher: Launcher, matrix: GpuMatrix, values: int, norm: Norm, logits: int, pdl: bool = True
) -> None:
    """Enqueue logits f32 [rows] of one token, values f32 [cols] before the norm; a float matrix, cols % 4 == 0."""
    warps = min(8, max(1, -(-matrix.cols // 1024)))
    defines = {"COLS": matrix.cols, "WEIGHT_TYPE": matrix.type_id, "WARPS": warps}
    function = launcher.function("moe_logits.cu", "logits_of_one", defines)
    args = (matrix.pointer, norm.weights, values, logits, c_float(norm.epsilon))
    launcher.launch(function, matrix.rows, warps * 32, 0, args, pdl)


def _gate_up(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen | RouterRule,
    source: Activations,
    n_tokens: int,
    hidden: int,
    norm: Norm | None,
    pdl: bool,
) -> None:
    tiling = _gate_up_tiling(launcher, experts, n_tokens)
    assert tiling is not None
    prologue = _NORMED if norm else _QUANTISED if source.codes else _PLAIN
    defines = expert_defines(experts.gate, experts, choice, n_tokens, tiling) | {
        "TYPE_1": experts.up.type_id,
        "ACTIVATION": experts.activation,
        "PROLOGUE": prologue,
        "ROUNDS": _rounds(experts, n_tokens, tiling),
    }
    function = launcher.function("moe_gate_up.cu", "gate_up", defines)
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
        values=source.values,
        norm=norm.weights if norm else 0,
        norm_epsilon=norm.epsilon if norm else 0.0,
    )
    block, hesitant = tiling.warps * 32, experts.gate.experts > 1
    launcher.launch(function, tiling.blocks, block, tiling.shared_bytes, (call,), pdl, hesitant=hesitant)


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
    tiling = _down_tiling(launcher, experts, n_tokens)
    assert tiling is not None
    chooses = isinstance(choice, RouterRule)
    residual = choice.residual if isinstance(choice, RouterRule) and choice.residual else output
    own = {"CHOOSE_EARLY": int(chooses), "FOLDED": int(residual != output)}
    defines = expert_defines(experts.down, experts, choice, n_tokens, tiling) | own
    function = launcher.function("moe_down.cu", "down", defines)
    call = _DownStruct(
        router=router_struct(choice),
        down=experts.down.pointer,
        expert_bytes=experts.down.expert_bytes,
        hidden=hidden_struct(experts, n_tokens, hidden),
        residual=residual if accumulate else 0,
        output=output,
        output_stride=experts.down.rows,
    )
    launcher.launch(function, tiling.blocks, tiling.warps * 32, tiling.shared_bytes, (call,), pdl)
