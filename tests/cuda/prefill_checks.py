"""What products of many tokens must satisfy, on any device: tensor-core kernel, cuBLAS path, grouped experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.cuda.devices import Device
from tests.cuda.matmul_checks import (
    FLOAT_TYPES,
    activations,
    assert_near,
    make_matrix,
    put_quantised,
    quantised_like_kernel,
)
from worker.cuda.few import FEW_TOKENS, multiply_few
from worker.cuda.linear import (
    dense_network,
    linear,
    linear_workspace_bytes,
    moe,
    moe_workspace_bytes,
    takes_network,
)
from worker.cuda.matmul import Activations, Epilogue, Part
from worker.cuda.matmul_moe import Chosen, Experts
from worker.cuda.prefill import Blas, multiply_in_kernel, to_halves
from worker.ops.reference import activate, choose_experts

# Halves of weights and of activations are off by 2^-11 each, of gate times up once more; sums are f32. Codes turned
# into halves are no further off, once they are what is compared with.
HALVES_LIMIT = 1e-3


def assert_near_codes(
    y: NDArray[np.float32], expected: NDArray[np.float64], unquantised: NDArray[np.float64], what: str
) -> None:
    """For two products with codes between them: rounding to halves moves a few of the codes by one, which is less than
    half of what quantising itself moves the result by, from `unquantised` to `expected`."""
    quantising = float(np.linalg.norm(unquantised - expected) / np.linalg.norm(expected))
    assert_near(y, expected, 2 * HALVES_LIMIT + quantising / 2, what)


def check_few(device: Device, name: str, n_tokens: int, rows: int, cols: int, size: float = 1.0) -> None:
    """few.cu by itself, with a bias and accumulation; `size` scales everything but weights."""
    rng = np.random.default_rng(rows + n_tokens)
    matrix, w = make_matrix(device, rng, name, rows, cols)
    x = activations(rng, n_tokens, cols) * np.float32(size)
    if name in FLOAT_TYPES:
        halves = device.put(np.full((n_tokens, cols), np.nan, np.float16))
        to_halves(device.launcher, device.put(x), halves, x.size)
        source, prepared = Activations(0, halves=halves), x.astype(np.float16).astype(np.float64)
    else:
        source, prepared = put_quantised(device, x)
    bias = rng.standard_normal(rows).astype(np.float32) * np.float32(size)
    start = rng.standard_normal((n_tokens, rows + 1)).astype(np.float32) * np.float32(size)
    part = Part(matrix, device.put(start), rows + 1, device.put(bias))
    assert multiply_few(device.launcher, [part], source, n_tokens, Epilogue(accumulate=True, scale=0.5))
    y = device.get(part.output)
    expected = start[:, :rows] + 0.5 * (prepared @ w[0].astype(np.float64).T) + bias
    what = f"{name} T={n_tokens} rows={rows} cols={cols}"
    assert_near(y[:, :rows], expected, HALVES_LIMIT, what)
    assert (y[:, rows] == start[:, rows]).all(), "written past the rows"


def check_tensor_cores(device: Device, name: str, n_tokens: int, rows: int, cols: int) -> None:
    """mma.cu by itself, with a bias and accumulation."""
    rng = np.random.default_rng(rows + n_tokens)
    matrix, w = make_matrix(device, rng, name, rows, cols)
    x = activations(rng, n_tokens, cols)
    halves = device.put(np.full((n_tokens, cols), np.nan, np.float16))
    to_halves(device.launcher, device.put(x), halves, x.size)
    np.testing.assert_array_equal(device.get(halves), x.astype(np.float16))
    bias = rng.standard_normal(rows).astype(np.float32)
    start = rng.standard_normal((n_tokens, rows + 1)).astype(np.float32)
    part = Part(matrix, device.put(start), rows + 1, device.put(bias))
    multiply_in_kernel(device.launcher, part, halves, n_tokens, Epilogue(accumulate=True, scale=0.5))
    y = device.get(part.output)
    product = x.astype(np.float16).astype(np.float64) @ w[0].astype(np.float64).T
    what = f"{name} T={n_tokens} rows={rows} cols={cols}"
    assert_near(y[:, :rows], start[:, :rows] + 0.5 * product + bias, HALVES_LIMIT, what)
    assert (y[:, rows] == start[:, rows]).all(), "written past the rows"


def check_linear(
    device: Device, blas: Blas | None, names: tuple[str, ...], n_tokens: int, cols: int, rows: int = 136
) -> None:
    """The dispatch for any number of tokens; f32 activations only."""
    rng = np.random.default_rng(n_tokens)
    made = [make_matrix(device, rng, name, rows + 8 * i, cols) for i, name in enumerate(names)]
    x = activations(rng, n_tokens, cols)
    biases = [rng.standard_normal(matrix.rows).astype(np.float32) for matrix, _ in made]
    parts = [
        Part(matrix, device.put(np.zeros((n_tokens, matrix.rows), np.float32)), matrix.rows, device.put(bias))
        for (matrix, _), bias in zip(made, biases, strict=True)
    ]
    workspace = device.put(np.zeros(max(1, linear_workspace_bytes(parts, n_tokens)), np.uint8))
    source = Activations(device.put(x))
    linear(device.launcher, parts, source, n_tokens, blas=blas, workspace=workspace)
    for name, part, bias, (_, w) in zip(names, parts, biases, made, strict=True):
        has_codes = n_tokens <= FEW_TOKENS and name not in FLOAT_TYPES
        prepared = quantised_like_kernel(x.astype(np.float64)) if has_codes else x.astype(np.float64)
        expected = prepared @ w[0].astype(np.float64).T + bias
        assert_near(device.get(part.output), expected, HALVES_LIMIT, f"{name} T={n_tokens}")


def check_network(device: Device, names: tuple[str, str, str], n_tokens: int, n_embd: int, n_ff: int) -> None:
    """A dense network in two launches, from f32 activations."""
    rng = np.random.default_rng(n_tokens)
    gate, up = (make_matrix(device, rng, name, n_ff, n_embd) for name in names[:2])
    down = make_matrix(device, rng, names[2], n_embd, n_ff)
    network = Experts(gate[0], up[0], down[0], 1)
    assert takes_network(device.launcher, network, n_tokens)
    x = activations(rng, n_tokens, n_embd)
    start = rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    output, hidden = device.put(start), device.put(np.zeros((n_tokens, n_ff), np.float32))
    workspace = device.put(np.zeros((n_tokens, n_embd), np.float32))
    source = Activations(device.put(x))
    dense_network(device.launcher, network, source, n_tokens, hidden, output, workspace, accumulate=True)
    inputs = quantised_like_kernel(x.astype(np.float64))
    h = activate((inputs @ gate[1][0].T).astype(np.float32), 0) * (inputs @ up[1][0].T)
    expected, unquantised = (start + between @ down[1][0].T for between in (quantised_like_kernel(h), h))
    assert_near_codes(device.get(output), expected, unquantised, f"{names} T={n_tokens}")


def check_grouped(
    device: Device,
    names: tuple[str, str, str],
    n_tokens: int,
    shape: tuple[int, int, int, int],
    activation: int = 0,
    hidden_group: int = 16,
) -> None:
    """gate, up and down types; shape = n_embd, n_ff, experts, used; one expert gets most of the tokens. `hidden_group`:
    hidden values that share a scale, where there are few tokens."""
    n_embd, n_ff, n_experts, n_used = shape
    rng = np.random.default_rng(n_embd + n_tokens)
    made = [
        make_matrix(device, rng, name, rows, cols, n_experts)
        for name, rows, cols in zip(names, (n_ff, n_ff, n_embd), (n_embd, n_embd, n_ff), strict=True)
    ]
    experts = Experts(made[0][0], made[1][0], made[2][0], n_used, activation)
    gate, up, down = (values for _, values in made)
    x = activations(rng, n_tokens, n_embd)
    if n_tokens > FEW_TOKENS:
        x /= np.float32(64)  # what is between stays in the range of halves
    logits = rng.standard_normal((n_tokens, n_experts)).astype(np.float32)
    logits[:, n_experts // 2] += 3
    ids, weights = choose_experts(logits, None, n_used, 0, True, 1.0)
    start = rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    output = device.put(start)
    choice = Chosen(device.put(np.ascontiguousarray(ids)), device.put(np.ascontiguousarray(weights)))
    workspace = device.put(np.zeros(moe_workspace_bytes(experts, n_tokens), np.uint8))
    source = Activations(device.put(x))
    moe(device.launcher, experts, choice, source, n_tokens, output, workspace, accumulate=True)
    expected = start.astype(np.float64)
    unquantised = expected.copy()
    has_codes = n_tokens <= FEW_TOKENS
    inputs = quantised_like_kernel(x.astype(np.float64)) if has_codes else x.astype(np.float64)
    for expert in range(n_experts):
        tokens, slots = np.nonzero(ids == expert)
        if len(tokens):
            h = activate((inputs[tokens] @ gate[expert].T).astype(np.float32), activation)
            h = h * (inputs[tokens] @ up[expert].T)
            codes = quantised_like_kernel(h, hidden_group) if has_codes else h
            np.add.at(expected, tokens, weights[tokens, slots][:, None] * (codes @ down[expert].T))
            np.add.at(unquantised, tokens, weights[tokens, slots][:, None] * (h @ down[expert].T))
    assert_near_codes(device.get(output), expected, unquantised, f"{names} T={n_tokens} {shape}")
