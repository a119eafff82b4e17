"""Every kernel variant that is compiled without a GPU in the tests: (source, definitions).

Shapes are compile-time constants of many kernels; here each type and each branch stands once, with small shapes.
A family of kernels adds its variants with a function of its own module listed in `FAMILIES`.
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
    yield "gemv.cu", {**shape, **mixed, "TOKENS": 16, "ROWS": 2, "PROLOGUE": 0}
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


def _few_moe_variants() -> Iterator[Variant]:
    shape = {"N_EXPERTS": 40, "N_USED": 4, "WARPS": 4, "STAGES": 2, "TOKENS": 4, "ACTIVATION": 0, "CHOOSE": 1}
    softmax = {"SIGMOID": 0, "BIASED": 0, "NORMALISED": 1}
    biased = {"SIGMOID": 1, "BIASED": 1, "NORMALISED": 0, "ACTIVATION": 1}
    for kind in _QUANTISED:
        common = {**shape, **(biased if kind == 8 else softmax), "TYPE_0": kind}
        gated = {
            "COLS": 512,
            "MATRIX_ROWS": 96,
            "TYPE_1": kind,
            "ROWS": 4,
            "STAGE_ROWS": 2,
            "STAGES": 3,
            "TOGETHER": 2,
        }
        yield "few_gate_up.cu", {**common, **gated}
        down = {"COLS": 256, "MATRIX_ROWS": 500, "ROWS": 2}
        yield "few_down.cu", {**common, **down}
    given: dict[str, int | float | str] = {
        **shape,
        "CHOOSE": 0,
        "COLS": 96,
        "MATRIX_ROWS": 256,
        "TYPE_0": 2,
        "ROWS": 1,
        "WARPS": 16,
    }
    yield "few_gate_up.cu", {**given, "TYPE_1": 8, "TOKENS": 32, "STAGE_ROWS": 1, "TOGETHER": 4}
    yield "few_down.cu", given
    for kind, tokens in zip(_FLOATS, (1, 2, 4), strict=True):
        router: dict[str, int | float | str] = {
            "COLS": 2304,
            "WEIGHT_TYPE": kind,
            "TOKENS": tokens,
            "WARPS": 8,
        }
        yield "few_router.cu", router


def _element_variants() -> Iterator[Variant]:
    for kind in (*_FLOATS, *_QUANTISED):
        yield "elementwise.cu", {"FILE_TYPE": kind}
    yield "elementwise.cu", {"VECTORS": 8}
    for is_f16 in (0, 1):
        yield "router.cu", {"MATRIX_F16": is_f16}
    yield "sampler.cu", {}
    yield "exchange.cu", {}


def _attention_variants() -> Iterator[Variant]:
    """Decode attention as it runs, fused with rope, for every shape; alone, as tests and benchmarks use it, for one."""
    for cluster in (2, 4, 8):
        yield "attention_decode.cu", {"FUSED": 1, "WARPS": 8, "CLUSTER": cluster, "STAGES": 1}
    for head_dim in (64, 80, 96, 128, 256):
        for is_q8 in (0, 1) if head_dim % 32 == 0 else (0,):
            cache: dict[str, int | float | str] = {"HEAD_DIM": head_dim, "KV_Q8": is_q8}
            turned = {"ROPE_DIM": head_dim // 2, "ROPE_STYLE": is_q8, "NORMS": 3 * is_q8}
            yield "rope.cu", {**cache, **turned}
            yield "kv_pages.cu", {**cache, "TO_HOST": is_q8}
            cut = {**cache, "WARPS": 4, "STAGES": 2}
            yield "attention_decode.cu", {**cut, **turned, "FUSED": 1, "HEADS": 8 - is_q8}
            if head_dim == 64:
                yield "attention_decode.cu", {**cut, "FUSED": 0, "HEADS": 16}
            tile = {"TILE_ROWS": 64, "STAGES": 2 - is_q8}
            yield "attention_prefill.cu", {**cache, **tile}


def _few_cut(token_tile: int, chunk_rows: int, chunks: int) -> dict[str, int | float | str]:
    cut: dict[str, int | float | str] = {"TOKEN_TILE": token_tile, "CHUNK_ROWS": chunk_rows, "CHUNKS": chunks}
    dense = {"N_EXPERTS": 1, "N_USED": 1, "EARLY": 0, "GLU": 0}
    return {**cut, **dense, "WARPS": 2, "STAGES": 2, "RESIDENT": 1}


def _prefill_variants() -> Iterator[Variant]:
    shape = {"COLS": 512, "ACTIVATION": 0}
    for kind in (*_FLOATS, *_QUANTISED):
        yield "mma.cu", {**shape, "TYPE_0": kind, "TYPE_1": kind, "TOKEN_TILE": 64, "BUFFERS": 1, "GLU": 0}
        yield "few.cu", {**shape, **_few_cut(16, 16, 1), "TYPE_0": kind}
    yield "few.cu", {**shape, **_few_cut(16, 32, 2), "TYPE_0": 12, "TYPE_1": 14, "TYPE_2": 8}
    mixture = {"N_EXPERTS": 40, "N_USED": 4, "TYPE_0": 12, "TYPE_1": 14}
    yield "few.cu", {**shape, **_few_cut(8, 32, 2), **mixture, "GLU": 1}
    yield "few.cu", {**shape, **_few_cut(8, 32, 2), **mixture, "EARLY": 1}
    for tile, buffers in ((64, 1), (64, 2)):
        common = {"TOKEN_TILE": tile, "BUFFERS": buffers, "TYPE_0": 12, "TYPE_1": 12}
        yield "mma.cu", {**shape, **common, "GLU": 1}
    yield "mma.cu", {**shape, "TYPE_0": 14, "TYPE_1": 14, "TOKEN_TILE": 64, "BUFFERS": 2, "GLU": 0}


FAMILIES: dict[str, Callable[[], Iterator[Variant]]] = {
    "repack": _repack_variants,
    "gemv": _gemv_variants,
    "moe": _moe_variants,
    "few-moe": _few_moe_variants,
    "elements": _element_variants,
    "attention": _attention_variants,
    "prefill": _prefill_variants,
}


def all_variants() -> list[Variant]:
    return [variant for family in FAMILIES.values() for variant in family()]
