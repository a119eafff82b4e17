"""The element-wise operations on the GPU: embedding rows, norms, quantising, gated activations, adding, soft caps.

Everything is queued on the launcher's stream; device pointers are plain integers, nothing is allocated here. All
kernels wait for the kernel in front before they touch its results, so `pdl` is always allowed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from configs.errors import EngineError
from worker.cuda.driver import Launcher

GROUP = 32
"""Columns that share a scale in quantised activations."""

_SOURCE = "elementwise.cu"
_THREADS = 256
_MAX_NORM_WIDTH = 32768

c_int, c_float = ctypes.c_int32, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a kernel leaves its result [tokens, width], in any of three forms; 0 is "not wanted".

    `values`: f32. `halves`: f16, clamped to its range. `codes` int8 with `scales` f32 [tokens, width / 32] (largest
    magnitude / 127) and `sums` f32 of the same shape (scale times the sum of the codes): all three or none; only for
    widths that are multiples of 32.
    """

    values: int = 0
    halves: int = 0
    codes: int = 0
    scales: int = 0
    sums: int = 0

    def arguments(self) -> tuple[int, ...]:
        """In the order in which the kernels take them."""
        return (self.values, self.halves, self.codes, self.scales, self.sums)

    def check(self, width: int) -> None:
        wanted = [bool(pointer) for pointer in (self.codes, self.scales, self.sums)]
        if any(wanted) and not all(wanted):
            raise EngineError("quantised activations need codes, scales and sums together")
        if self.codes and width % GROUP:
            raise EngineError(f"{width} columns cannot be quantised: use a multiple of {GROUP}")


@dataclass(frozen=True, slots=True)
class FileRows:
    """A matrix in the order of the GGUF file: `type_id` is GGML's, `row_bytes` the stride, `width` the columns."""

    type_id: int
    pointer: int
    row_bytes: int
    width: int


def embed(
    launcher: Launcher,
    rows: FileRows,
    token_ids: int,
    n_tokens: int,
    scale: float,
    output: int,
    *,
    pdl: bool = False,
) -> None:
    """output f32 [n_tokens, width] = rows of `token_ids` (i32) times `scale`, bit for bit the reference's values."""
    function = launcher.function(_SOURCE, "embed", {"FILE_TYPE": rows.type_id})
    args = (rows.pointer, c_int(rows.row_bytes), c_int(rows.width), token_ids, c_float(scale), output)
    launcher.launch(function, (_blocks(rows.width), n_tokens), _THREADS, 0, args, pdl)


def select_rows(
    launcher: Launcher, source: int, rows: int, n_rows: int, width: int, output: int, *, pdl: bool = False
) -> None:
    """output f32 [n_rows, width]: row j is row rows[j] (i32) of source f32 [*, width]."""
    function = launcher.function(_SOURCE, "select_rows")
    args = (source, rows, c_int(width), output)
    launcher.launch(function, (_blocks(width), n_rows), _THREADS, 0, args, pdl)


def rms_norm(
    launcher: Launcher,
    source: int,
    weight: int,
    n_tokens: int,
    width: int,
    eps: float,
    outputs: Outputs,
    *,
    accumulate: bool = False,
    rows: int = 0,
    pdl: bool = False,
) -> None:
    """Norm of source f32 [n_tokens, width] times weight f32 [width] into `outputs`.

    `accumulate`: outputs.values += the norm (the other forms then hold the sum). `rows` (i32 [n_tokens]) picks rows
    of the source, as the head does.
    """
    outputs.check(width)
    if width > _MAX_NORM_WIDTH:
        raise EngineError(f"a norm over {width} columns: the GPU kernels go up to {_MAX_NORM_WIDTH}")
    vectors = -(-width // 4)
    threads = min(1024 if n_tokens <= 32 else 256, 32 * -(-vectors // 32))
    per_thread = 1
    while per_thread * threads < vectors:
        per_thread *= 2
    if per_thread > 8:
        threads, per_thread = 1024, 8
    function = launcher.function(_SOURCE, "rms_norm", {"VECTORS": per_thread})
    args = (
        source,
        rows,
        weight,
        c_int(width),
        c_float(eps),
        c_int(accumulate),
        *outputs.arguments(),
    )
    launcher.launch(function, n_tokens, threads, 0, args, pdl)


def convert(
    launcher: Launcher, source: int, n_tokens: int, width: int, outputs: Outputs, *, pdl: bool = False
) -> None:
    """source f32 [n_tokens, width] in the forms of `outputs`."""
    outputs.check(width)
    function = launcher.function(_SOURCE, "convert")
    args = (source, ctypes.c_int64(n_tokens * width), *outputs.arguments())
    launcher.launch(function, _vector_blocks(n_tokens * width), _THREADS, 0, args, pdl)


def glu(
    launcher: Launcher,
    gate: int,
    up: int,
    n_tokens: int,
    width: int,
    activation: int,
    outputs: Outputs,
    *,
    pdl: bool = False,
) -> None:
    """activation(gate) * up, both f32 [n_tokens, width]; `activation` 0 silu, 1 gelu (tanh). May write over gate."""
    outputs.check(width)
    function = launcher.function(_SOURCE, "glu")
    args = (gate, up, ctypes.c_int64(n_tokens * width), c_int(activation), *outputs.arguments())
    launcher.launch(function, _vector_blocks(n_tokens * width), _THREADS, 0, args, pdl)


def add(launcher: Launcher, source: int, target: int, count: int, *, pdl: bool = False) -> None:
    """target f32 [count] += source f32 [count]."""
    function = launcher.function(_SOURCE, "add")
    launcher.launch(
        function, _vector_blocks(count), _THREADS, 0, (source, target, ctypes.c_int64(count)), pdl
    )


def scale_and_cap(
    launcher: Launcher, values: int, count: int, scale: float, cap: float, *, pdl: bool = False
) -> None:
    """values f32 [count] times `scale`, then cap * tanh(x / cap) where cap is not 0, in place."""
    function = launcher.function(_SOURCE, "scale_and_cap")
    args = (values, ctypes.c_int64(count), c_float(scale), c_float(cap))
    launcher.launch(function, _vector_blocks(count), _THREADS, 0, args, pdl)


def _blocks(count: int) -> int:
    return -(-count // _THREADS)


def _vector_blocks(count: int) -> int:
    """Blocks for one thread per four values."""
    return -(-count // (4 * _THREADS))
