"""What the matrix kernels must satisfy, on any device: each function runs one case and compares with numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.cuda.devices import Device
from worker.cuda.formats import GpuMatrix, planar_row_bytes, type_id_of
from worker.cuda.matmul import Activations, Epilogue, Norm, Part, gemv, quantise
from worker.cuda.matmul_moe import DENSE, Chosen, Experts, RouterRule, hidden_bytes, moe_decode, router_logits
from worker.cuda.repack import repack
from worker.cuda.router_fold import FoldedRouter, RouterCall, fold_router, folded_bytes
from worker.model.quants import FORMATS, dequantize
from worker.model.types import BY_NAME
from worker.ops.reference import activate, choose_experts, rms_norm

Float32Array = NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
SMALL_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SUPER_BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
QUANT_TYPES = SMALL_BLOCK_TYPES + SUPER_BLOCK_TYPES


def random_file(rng: np.random.Generator, name: str, rows: int, cols: int) -> NDArray[np.uint8]:
    """File bytes [rows, bytes]: every code and small scale occurs; the f16 scales are sane."""
    if name in FLOAT_TYPES:
        values = rng.standard_normal((rows, cols), np.float32)
        if name == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return np.ascontiguousarray(values.astype(FORMATS[name].layout)).view(np.uint8)
    layout = FORMATS[name].layout
    n_blocks = rows * cols // BY_NAME[name].block_elements
    blocks = rng.integers(0, 256, (n_blocks, layout.itemsize), np.uint8).view(layout).reshape(-1)
    for field in ("scale", "minimum"):
        if field in (layout.names or ()):
            blocks[field] = rng.uniform(-0.01, 0.02, n_blocks)
    return blocks.view(np.uint8).reshape(rows, -1)


def activations(rng: np.random.Generator, n_tokens: int, cols: int) -> Float32Array:
    """Gaussian rows with outliers 50 times as large, a row of zeros, a group of zeros."""
    x = rng.standard_normal((n_tokens, cols), np.float32)
    x[rng.random(x.shape) < 0.003] *= 50
    if n_tokens > 2:
        x[1] = 0
    if cols >= 64:
        x[:, :32] = 0
    return x


def make_matrix(
    device: Device, rng: np.random.Generator, name: str, rows: int, cols: int, experts: int = 1
) -> tuple[GpuMatrix, Float32Array]:
    """Random weights, repacked on the device, and their values [experts, rows, cols]."""
    file = random_file(rng, name, experts * rows, cols)
    kind = type_id_of(name)
    planar = device.put(np.full((experts * rows, planar_row_bytes(kind, cols)), 0xCD, np.uint8))
    repack(device.launcher, kind, cols, experts * rows, device.put(file), planar)
    values = dequantize(name, file.reshape(-1), (cols, experts * rows))
    return GpuMatrix(kind, rows, cols, planar, experts), values.reshape(experts, rows, cols)


def put_quantised(device: Device, x: Float32Array) -> tuple[Activations, NDArray[np.float64]]:
    """x on the device with its codes, and the values that the codes stand for."""
    n_tokens, cols = x.shape
    groups = np.zeros((n_tokens, cols // 32), np.float32)
    codes = device.put(np.zeros((n_tokens, cols), np.int8))
    source = Activations(device.put(x), codes, device.put(groups), device.put(groups))
    quantise(device.launcher, source.values, n_tokens, cols, source)
    stored, scales = device.get(source.codes).astype(np.float64), device.get(source.scales)
    prepared = stored * scales.repeat(32, -1)
    step = scales.repeat(32, -1) * 0.501
    assert (np.abs(prepared - x) <= step).all()
    np.testing.assert_allclose(
        device.get(source.sums), prepared.reshape(n_tokens, -1, 32).sum(-1), rtol=1e-5, atol=1e-5
    )
    return source, prepared


def assert_product(y: Float32Array, x: NDArray[np.float64], w: Float32Array, what: str) -> None:
    """y = x W^T up to f32 rounding: one per group in the sum and a few in scales and minimums, which may cancel
    in `w` but not in the kernel's sums (factor 8)."""
    exact = x @ w.astype(np.float64).T
    magnitudes = np.abs(x) @ np.abs(w.astype(np.float64)).T
    tolerance = np.finfo(np.float32).eps * (w.shape[1] / 32 + 40) * 8 * magnitudes + 1e-30
    worst = np.unravel_index(np.argmax(np.abs(y - exact) / tolerance), y.shape)
    assert (np.abs(y - exact) <= tolerance).all(), (
        f"{what}: {y[worst]} instead of {exact[worst]} at (token, row) {worst}, "
        f"{int((np.abs(y - exact) > tolerance).sum())} of {y.size} are off"
    )


def check_gemv(device: Device, name: str, n_tokens: int, rows: int, cols: int) -> None:
    """One matrix with bias: stored, then accumulated with a scale."""
    rng = np.random.default_rng(rows * cols + n_tokens)
    matrix, w = make_matrix(device, rng, name, rows, cols)
    x = activations(rng, n_tokens, cols)
    if name in FLOAT_TYPES:
        source, prepared = Activations(device.put(x)), x.astype(np.float64)
    else:
        source, prepared = put_quantised(device, x)
    bias = rng.standard_normal(rows).astype(np.float32) * 0
    output = device.put(np.full((n_tokens, rows), np.nan, np.float32))
    part = Part(matrix, output, rows, device.put(bias))
    gemv(device.launcher, [part], source, n_tokens)
    what = f"{name} T={n_tokens} rows={rows} cols={cols}"
    first = device.get(output)
    assert_product(first, prepared, w[0], what)
    gemv(device.launcher, [part], source, n_tokens, epilogue=Epilogue(accumulate=True, scale=2.0))
    np.testing.assert_allclose(device.get(output), first * 3, rtol=1e-5, atol=1e-5 * np.abs(first).max())


def check_parts(device: Device, names: tuple[str, ...], n_tokens: int, cols: int) -> None:
    """Several matrices of different types and sizes in a launch, biases, a stride, a soft cap."""
    rng = np.random.default_rng(len(names) + n_tokens)
    made = [make_matrix(device, rng, name, 13 + 24 * i, cols) for i, name in enumerate(names)]
    x = activations(rng, n_tokens, cols)
    source, prepared = put_quantised(device, x)
    parts, biases = [], []
    for matrix, _ in made:
        bias = rng.standard_normal(matrix.rows).astype(np.float32)
        biases.append(bias)
        output = device.put(np.zeros((n_tokens, matrix.rows + 3), np.float32))
        parts.append(Part(matrix, output, matrix.rows + 3, device.put(bias)))
    gemv(device.launcher, parts, source, n_tokens, epilogue=Epilogue(softcap=30.0))
    for part, bias, (matrix, w), name in zip(parts, biases, made, names, strict=True):
        values = prepared if name not in FLOAT_TYPES else x.astype(np.float64)
        expected = 30 * np.tanh((values @ w[0].astype(np.float64).T + bias) / 30)
        y = device.get(part.output)
        np.testing.assert_allclose(y[:, : matrix.rows], expected, rtol=2e-3, atol=2e-3, err_msg=name)
        assert not y[:, matrix.rows :].any(), "written past the rows"


def quantised_like_kernel(x: NDArray[np.float64], group: int = 32) -> NDArray[np.float64]:
    groups = x.reshape(len(x), -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.rint(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def assert_near(y: Float32Array, expected: NDArray[np.float64], limit: float, what: str) -> None:
    """Relative distance: where kernels quantise by themselves, a code on an edge may fall to either side."""
    distance = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    assert distance <= limit, f"{what}: {distance:.2e} away, {limit:.0e} allowed"


def check_prologue(device: Device, name: str, n_tokens: int, cols: int, with_norm: bool) -> None:
    """The kernel normalises and quantises by itself."""
    rng = np.random.default_rng(cols)
    matrix, w = make_matrix(device, rng, name, 29, cols)
    x = activations(rng, n_tokens, cols)
    weights = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    output = device.put(np.zeros((n_tokens, 29), np.float32))
    norm = Norm(device.put(weights), 1e-6) if with_norm else None
    gemv(device.launcher, [Part(matrix, output, 29)], Activations(device.put(x)), n_tokens, norm=norm)
    inputs = (rms_norm(x, weights, 1e-6) if with_norm else x).astype(np.float64)
    prepared = inputs if name in FLOAT_TYPES else quantised_like_kernel(inputs)
    assert_near(
        device.get(output), prepared @ w[0].T.astype(np.float64), 1e-3, f"{name} T={n_tokens} cols={cols}"
    )


def check_router(device: Device, name: str, rows: int, cols: int) -> None:
    """Logits of one token with the norm inside; f32 all the way."""
    rng = np.random.default_rng(cols)
    matrix, w = make_matrix(device, rng, name, rows, cols)
    x, weights = activations(rng, 1, cols), rng.uniform(0.5, 1.5, cols).astype(np.float32)
    logits = device.put(np.zeros(rows, np.float32))
    router_logits(device.launcher, matrix, device.put(x), Norm(device.put(weights), 1e-6), logits)
    expected = rms_norm(x, weights, 1e-6).astype(np.float64) @ w[0].T.astype(np.float64)
    assert_near(device.get(logits)[None], expected, 1e-5, f"router {name} {rows} x {cols}")


def check_folded_router(device: Device, name: str, router_name: str, shape: tuple[int, int, int]) -> None:
    """Product and logits of a launch against those one after the other; shape = cols, rows, experts.

    The products R W are halves (2^-11 each, independent), the rest is f32: 1e-3 of the logits' norm is three times what
    was seen. Experts that close may change places against a router of its own.
    """
    cols, rows, n_experts = shape
    rng = np.random.default_rng(cols + n_experts)
    matrix, w = make_matrix(device, rng, name, rows, cols)
    router, r = make_matrix(device, rng, router_name, n_experts, rows)
    norm = rng.uniform(0.5, 1.5, rows).astype(np.float32)
    source, prepared = put_quantised(device, activations(rng, 1, cols))
    residual = rng.standard_normal(rows).astype(np.float32)
    rows_at = device.put(np.full(folded_bytes(matrix, n_experts) // 2, np.nan, np.float16))
    folded = FoldedRouter(rows_at, router.rows)
    fold_router(device.launcher, folded, matrix, router, device.put(norm))
    output, logits = device.put(np.zeros(rows, np.float32)), device.put(np.zeros(n_experts, np.float32))
    call = RouterCall(folded, device.put(residual), logits)
    part = Part(matrix, output, rows, residual=call.residual)
    gemv(device.launcher, [part], source, 1, epilogue=Epilogue(accumulate=True), router=call)
    what = f"{name} {router_name} {shape}"
    assert_product(device.get(output)[None] - residual, prepared, w[0], what)
    sums = residual + prepared[0] @ w[0].astype(np.float64).T
    assert_near(device.get(logits)[None], (r[0].astype(np.float64) @ (norm * sums))[None], 1e-3, what)


def check_moe(
    device: Device,
    names: tuple[str, str, str],
    n_tokens: int,
    shape: tuple[int, int, int, int],
    *,
    in_kernel: bool,
    activation: int = 0,
    sigmoid: bool = False,
    folded: bool = False,
) -> None:
    """gate, up and down types; shape = n_embd, n_ff, experts, used; in_kernel: router logits and a norm go in.
    `folded`: the logits are those of a folded router, and the sum goes to a row of its own."""
    n_embd, n_ff, n_experts, n_used = shape
    rng = np.random.default_rng(n_embd + n_tokens)
    made = [
        make_matrix(device, rng, name, rows, cols, n_experts)
        for name, rows, cols in zip(names, (n_ff, n_ff, n_embd), (n_embd, n_embd, n_ff), strict=True)
    ]
    experts = Experts(made[0][0], made[1][0], made[2][0], n_used, activation)
    gate, up, down = (values.astype(np.float64) for _, values in made)
    x = activations(rng, n_tokens, n_embd)
    logits = rng.standard_normal((n_tokens, n_experts)).astype(np.float32)
    bias = rng.standard_normal(n_experts).astype(np.float32) if sigmoid and not folded else None
    ids, weights = choose_experts(logits, bias, n_used, int(sigmoid), True, 1.5)
    norm_weights = rng.uniform(0.5, 1.5, n_embd).astype(np.float32)
    start = x if folded else rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    output = device.put(np.full_like(start, np.nan) if folded else start)
    probe = Experts(made[0][0], made[1][0], made[2][0], n_used, activation)
    hidden = device.put(np.full(hidden_bytes(probe, n_tokens), 0xFF, np.uint8))
    if in_kernel:
        bias_pointer = device.put(bias) if bias is not None else 0
        values = device.put(x)
        rms = np.sqrt(np.square(x.astype(np.float64)).mean() + 1e-6) if folded else 1.0
        stored, residual = (logits * rms).astype(np.float32), values if folded else 0
        rule = RouterRule(device.put(stored), bias_pointer, sigmoid, True, 1.5, residual, 1e-6)
        norm = Norm(device.put(norm_weights), 1e-6)
        moe_decode(
            device.launcher,
            experts,
            rule,
            Activations(values),
            n_tokens,
            hidden,
            output,
            accumulate=True,
            norm=norm,
        )
        inputs = quantised_like_kernel(rms_norm(x, norm_weights, 1e-6).astype(np.float64))
    else:
        source, inputs = put_quantised(device, x)
        choice = Chosen(device.put(np.ascontiguousarray(ids)), device.put(np.ascontiguousarray(weights)))
        if n_experts == 1:
            choice, weights = DENSE, np.ones_like(weights)
        moe_decode(device.launcher, experts, choice, source, n_tokens, hidden, output, accumulate=True)
    expected = start.astype(np.float64)
    for token in range(n_tokens):
        for slot, expert in enumerate(ids[token]):
            h = activate((gate[expert] @ inputs[token]).astype(np.float32), activation)
            h = quantised_like_kernel((h * (up[expert] @ inputs[token]))[None], group=16)[0]
            expected[token] += weights[token, slot] * (down[expert] @ h)
    assert_near(device.get(output), expected, 2e-3, f"{names} T={n_tokens} {shape}")
