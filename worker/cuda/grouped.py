"""Mixtures for many tokens: slots (token, k) sorted by expert on the device, then tensor-core products per expert.

Nothing comes back to the host: tiles of tokens are listed on the device, and the launch has room for the most
there can be. Weighted sums are taken in the order of k, so that a result does not depend on the sorting.
"""

from __future__ import annotations

from ctypes import c_int

import msgspec

from worker.cuda.driver import Launcher
from worker.cuda.few import combine
from worker.cuda.formats import GpuMatrix
from worker.cuda.matmul import Activations
from worker.cuda.matmul_moe import Chosen, Experts, most_tiles
from worker.cuda.memory import aligned
from worker.cuda.prefill import MatrixCallStruct, launch_matrix_matrix, to_halves

_TILE_BYTES = 16


class GroupedWorkspace(msgspec.Struct, frozen=True):
    """Addresses of the scratch memory of one mixture, and its size in all."""

    halves: int  # f16 [tokens, n_embd]
    order: int  # i32 [slots]
    position_of: int  # i32 [slots]
    tiles: int  # [max_tiles]
    hidden: int  # f16 [slots, n_ff], sorted
    rows: int  # f32 [slots, n_embd], sorted
    total_bytes: int


def workspace(experts: Experts, n_tokens: int, base: int = 0) -> GroupedWorkspace:
    """Addresses from `base` (256-byte aligned) on; with base 0 only `total_bytes` means something."""
    slots = n_tokens * experts.n_used
    n_embd, n_ff = experts.gate.cols, experts.gate.rows
    sizes = {
        "halves": n_tokens * n_embd * 2,
        "order": slots * 4,
        "position_of": slots * 4,
        "tiles": max_tiles(experts, n_tokens) * _TILE_BYTES,
        "hidden": slots * n_ff * 2,
        "rows": slots * n_embd * 4,
    }
    addresses: dict[str, int] = {}
    end = base
    for name, size in sizes.items():
        addresses[name] = end
        end += aligned(size)
    return GroupedWorkspace(**addresses, total_bytes=end - base)


def token_tile(experts: Experts, n_tokens: int) -> int:
    """About the mean number of tokens of an expert, with room for the uneven: most fit into one tile."""
    mean = n_tokens * experts.n_used / experts.gate.experts
    return 16 if mean <= 8 else 32 if mean <= 20 else 64


def max_tiles(experts: Experts, n_tokens: int) -> int:
    return most_tiles(experts, n_tokens, token_tile(experts, n_tokens))


def moe_grouped(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen,
    source: Activations,
    n_tokens: int,
    output: int,
    scratch: GroupedWorkspace,
    *,
    accumulate: bool,
) -> None:
    """Enqueue output f32 [n_tokens, n_embd] (+)= the mixture of `source`: its halves, or its values made so."""
    n_embd, slots = experts.gate.cols, n_tokens * experts.n_used
    tile, tiles = token_tile(experts, n_tokens), max_tiles(experts, n_tokens)
    _sort(launcher, experts, choice, slots, tile, tiles, scratch)
    halves = source.halves or scratch.halves
    if not source.halves:
        to_halves(launcher, source.values, halves, n_tokens * n_embd)
    gate_up = _call(scratch, halves, scratch.hidden, experts.gate, slots)
    gate_up.input_rows, gate_up.input_divisor = scratch.order, experts.n_used
    gate_up.weights[1], gate_up.expert_bytes[1] = experts.up.pointer, experts.up.expert_bytes
    launch_matrix_matrix(
        launcher,
        experts.gate,
        experts.up,
        gate_up,
        token_tile=tile,
        n_tiles=tiles,
        activation=experts.activation,
    )
    down = _call(scratch, scratch.hidden, scratch.rows, experts.down, slots)
    launch_matrix_matrix(launcher, experts.down, experts.down, down, token_tile=tile, n_tiles=tiles)
    combine(launcher, experts, choice, n_tokens, scratch.rows, scratch.position_of, output, accumulate)


def _sort(
    launcher: Launcher,
    experts: Experts,
    choice: Chosen,
    slots: int,
    tile: int,
    tiles: int,
    scratch: GroupedWorkspace,
) -> None:
    function = launcher.function("group.cu", "sort_slots")
    n_experts = experts.gate.experts
    sizes = (c_int(slots), c_int(n_experts), c_int(tile), c_int(tiles))
    args = (choice.ids, scratch.order, scratch.position_of, scratch.tiles, *sizes)
    launcher.launch(function, 1, 1024, (2 * n_experts + 2) * 4, args, True)


def _call(
    scratch: GroupedWorkspace, source: int, target: int, matrix: GpuMatrix, slots: int
) -> MatrixCallStruct:
    call = MatrixCallStruct(
        input=source,
        tiles=scratch.tiles,
        output=target,
        input_divisor=1,
        n_tokens=slots,
        rows=matrix.rows,
        output_stride=matrix.rows,
    )
    call.weights[0], call.expert_bytes[0] = matrix.pointer, matrix.expert_bytes
    return call
