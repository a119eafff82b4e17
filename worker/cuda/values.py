"""The values that lowering hands to the kernels: addresses on the device with their shapes. No CUDA in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sampling = Literal["none", "greedy", "full"]


@dataclass(frozen=True, slots=True)
class FoldedNorm:
    """A norm that readers of its output may apply themselves: its input f32 [rows, width], its weights [width].
    `reader`: what they are; a router stands for a mixture, too, and a network has matrices that want codes."""

    values: int
    weights: int
    epsilon: float
    reader: Literal["router", "network", "matrices"] = "matrices"


@dataclass(frozen=True, slots=True)
class Rows:
    """One buffer of the op list: `values` is f32 [rows, width].

    Buffers that matrices multiply also have room for their rows as int8 `codes` [rows, width] with f32 `scales` and
    `sums` [rows, width / 32], which matrices read in steps of few rows, and as f16 `halves` (the same memory), which
    they read in all others; 0 is none. `values_are_read`: something reads the f32 even then. `norm`: the norm that
    writes these rows, where in a step of few rows all readers can do without it.
    """

    values: int
    width: int
    codes: int = 0
    scales: int = 0
    sums: int = 0
    halves: int = 0
    values_are_read: bool = True
    norm: FoldedNorm | None = None


@dataclass(frozen=True, slots=True)
class RowTable:
    """Rows of a file's matrix in file order, for looking up embeddings."""

    type_id: int
    columns: int
    address: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class InputAddresses:
    """Where a step's metadata lies on the device, int32 where not said.

    `token_ids`, `positions`, `sequence_of_token` [n_tokens]; `output_rows` [n_outputs]; `samplers`: records of
    `sampler.SAMPLER` [n_outputs]; `tiles` [n_tiles, 4] for prefill attention; `page_tables` [n_sequences, max_pages].
    """

    token_ids: int
    positions: int
    sequence_of_token: int
    output_rows: int
    samplers: int
    tiles: int
    page_tables: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Pinned memory of the host that a step reads and writes in place.

    `rows`: i32 [n_sequences, 4] as step_inputs.py has them, and `samplers`: records, in decode; else 0. `history` i32,
    `bias_ids` i32, `bias_values` f32: the pools that samplers index. The answers go to `tokens` i32 [n_outputs] or to
    `sampled`, records of `sampler.SAMPLED`. All but the first two are 0 where another device has the head.
    """

    rows: int = 0
    samplers: int = 0
    history: int = 0
    bias_ids: int = 0
    bias_values: int = 0
    tokens: int = 0
    sampled: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a launch needs to know of a step. A captured graph serves every step of one shape.

    `context_limit`: no position of the step is at or beyond it. `is_decode`: one token and one output a sequence.
    `n_tiles`: of prefill attention, 0 in decode. `sampling`: how the outputs become tokens; "none" leaves the logits.
    """

    n_tokens: int
    n_sequences: int
    n_outputs: int
    context_limit: int
    is_decode: bool
    inputs: InputAddresses
    n_tiles: int = 0
    sampling: Sampling = "full"
    mailbox: Mailbox = Mailbox()
