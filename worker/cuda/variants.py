"""Every kernel variant that is compiled without a GPU in the tests: (source, definitions).

Shapes are compile-time constants of many kernels; here each type and each branch stands once, with small shapes.
A family of kernels adds its variants with a function of its own module listed in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Variant = tuple[str, dict[str, int | float | str]]

ARCHITECTURES = (75, 80, 86, 89, 90, 120)


_FLOATS, _QUANTISED = (0, 1, 30), (2, 3, 6, 7, 8, 10, 11, 12, 13, 14)  # ggml type ids


def _repack_variants() -> Iterator[Variant]:
    for kind in _QUANTISED:
        yield "repack.cu", {"WEIGHT_TYPE": kind, "COLS": 256}
        yield "halves.cu", {"WEIGHT_TYPE": kind, "COLS": 256}
    yield "quantise.cu", {}
    yield "group.cu", {}
    yield "probe.cu", {}
    yield "handover.cu", {}


def _gemv_variants() -> Iterator[Variant]:
    shape = {"COLS": 512, "WARPS": 8, "STAGES": 2, "ROWS": 1, "HAS_BIAS": 1, "HAS_SCALE": 0}
    for kind in _FLOATS:
        yield "gemv.cu", {**shape, "TYPE_0": kind, "N_PARTS": 1, "TOKENS": 2, "PROLOGUE": 1}
    for kind in _QUANTISED:
        yield "gemv.cu", {**shape, "TYPE_0": kind, "N_PARTS": 1, "TOKENS": 1, "PROLOGUE": 2}
    mixed = {"TYPE_0": 12, "TYPE_1": 12, "TYPE_2": 14, "N_PARTS": 3}
    yield "gemv.cu", {**shape, **mixed, "TOKENS": 8, "ROWS": 2, "PROLOGUE": 0, "HAS_SCALE": 1}
    yield "gemv.cu", {**shape, **mixed, "TOKENS": 1, "PROLOGUE": 1}
    routed = {"TYPE_0": 12, "N_PARTS": 1, "TOKENS": 1, "PROLOGUE": 0, "ROUTER_ROWS": 2, "ROUTER_COLS": 512}
    yield "gemv.cu", {**shape, **routed}


def _moe_variants() -> Iterator[Variant]:
    for kind in _QUANTISED:
        yield "router_fold.cu", {"WEIGHT_TYPE": kind, "COLS": 512, "ROUTER_TYPE": _FLOATS[kind % 3]}
    for kind in _FLOATS:
        yield "moe_logits.cu", {"COLS": 512, "WEIGHT_TYPE": kind, "WARPS": 2}
    shape = {
        "COLS": 512,
        "MATRIX_ROWS": 512,
        "WARPS": 8,
        "STAGES": 1,
        "ROWS": 1,
        "N_EXPERTS": 8,
        "N_USED": 2,
        "TYPE_0": 12,
    }
    for activation, tokens, choose, prologue, biased in ((0, 1, 1, 2, 0), (1, 1, 1, 2, 1), (1, 4, 0, 0, 0)):
        common = {"ACTIVATION": activation, "TOKENS": tokens, "CHOOSE": choose, "CHOOSE_EARLY": choose}
        common |= {
            "FOLDED": choose - biased,
            "SIGMOID": activation,
            "BIASED": biased,
            "NORMALISED": 1 - biased,
        }
        gated = {"TYPE_1": 12, "PROLOGUE": prologue, "ROUNDS": 3}
        yield "moe_gate_up.cu", {**shape, **common, **gated}
        yield "moe_down.cu", {**shape, **common, "TYPE_0": 14}


def _element_variants() -> Iterator[Variant]:
    for kind in (*_FLOATS, *_QUANTISED):
        yield "elementwise.cu", {"FILE_TYPE": kind}
    yield "elementwise.cu", {"VECTORS": 8}
    for is_f16 in (0, 1):
        yield "router.cu", {"MATRIX_F16": is_f16}
    yield "sampler.cu", {}


def _attention_variants() -> Iterator[Variant]:
    for cluster in (2, 4, 8):
        yield "attention_decode.cu", {"FUSED": 1, "WARPS": 8, "CLUSTER": cluster}
    for head_dim in (64, 80, 96, 128, 256):
        for is_q8 in (0, 1) if head_dim % 32 == 0 else (0,):
            cache: dict[str, int | float | str] = {"HEAD_DIM": head_dim, "KV_Q8": is_q8}
            yield "rope.cu", cache
            for fused in (0, 1):
                cut = {**cache, "FUSED": fused}
                yield "attention_decode.cu", {**cut, "HEADS": 2 - is_q8, "WARPS": 8, "CLUSTER": fused}
                yield "attention_decode_long.cu", {**cut, "HEADS": 8, "WARPS": 4, "STAGES": 2 - is_q8}
            tile = {"TILE_ROWS": 64, "STAGES": 2 - is_q8}
            yield "attention_prefill.cu", {**cache, **tile}


def _prefill_variants() -> Iterator[Variant]:
    shape = {"COLS": 512, "ACTIVATION": 0}
    for kind in (*_FLOATS, *_QUANTISED):
        yield "mma.cu", {**shape, "TYPE_0": kind, "TYPE_1": kind, "TOKEN_TILE": 64, "BUFFERS": 1, "GLU": 0}
        few = {**shape, "TYPE_0": kind, "TYPE_1": kind, "TOKEN_TILE": 16, "N_TILES": 2, "WARPS": 8}
        yield "few.cu", {**few, "GLU": 0, "MIXTURE": 0}
    gated = {"TYPE_0": 12, "TYPE_1": 14, "TOKEN_TILE": 32, "N_TILES": 4, "WARPS": 4, "GLU": 1, "MIXTURE": 1}
    yield "few.cu", {**shape, **gated}
    for tile, buffers in ((64, 1), (64, 2)):
        common = {"TOKEN_TILE": tile, "BUFFERS": buffers, "TYPE_0": 12, "TYPE_1": 12}
        yield "mma.cu", {**shape, **common, "GLU": 1}
    yield "mma.cu", {**shape, "TYPE_0": 14, "TYPE_1": 14, "TOKEN_TILE": 64, "BUFFERS": 2, "GLU": 0}


_FAMILIES: tuple[Callable[[], Iterator[Variant]], ...] = (
    _repack_variants,
    _gemv_variants,
    _moe_variants,
    _element_variants,
    _attention_variants,
    _prefill_variants,
)


def all_variants() -> list[Variant]:
    return [variant for family in _FAMILIES for variant in family()]
