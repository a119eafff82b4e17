"""What the kernels of mixtures for 2 to 32 tokens must satisfy, on any device: choice, experts, norm and router."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.cuda.devices import Device
from tests.cuda.matmul_checks import (
    activations,
    assert_near,
    make_matrix,
    put_quantised,
    quantised_like_kernel,
)
from worker.cuda.matmul import Activations, Norm
from worker.cuda.matmul_few_moe import moe_few_vectors, norm_and_route, takes_few
from worker.cuda.matmul_moe import Chosen, Experts, RouterRule, hidden_bytes
from worker.cuda.router import choose_experts as choose_on_device
from worker.ops.reference import activate, choose_experts, rms_norm

Shape = tuple[int, int, int, int]  # n_embd, n_ff, experts, used


def _put_rule(
    device: Device, logits: NDArray[np.float32], is_sigmoid: bool
) -> tuple[RouterRule, NDArray[np.float32] | None]:
    """A router's rule for these logits; with a sigmoid there is a bias, too."""
    rng = np.random.default_rng(logits.size)
    bias = rng.standard_normal(logits.shape[1], np.float32) if is_sigmoid else None
    rule = RouterRule(device.put(logits), 0 if bias is None else device.put(bias), is_sigmoid, True, 1.5)
    return rule, bias


def check_few_experts(
    device: Device,
    names: tuple[str, str, str],
    n_tokens: int,
    shape: Shape,
    *,
    is_chosen: bool = False,
    is_sigmoid: bool = False,
) -> None:
    """gate, up and down types. `is_chosen`: ids and weights go in, not logits. One expert is wanted by nearly all."""
    n_embd, n_ff, n_experts, n_used = shape
    rng = np.random.default_rng(n_embd + n_tokens)
    sizes = ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff))
    made = [make_matrix(device, rng, name, *size, n_experts) for name, size in zip(names, sizes, strict=True)]
    experts = Experts(made[0][0], made[1][0], made[2][0], n_used, int(is_sigmoid))
    assert takes_few(device.launcher, experts, n_tokens)
    logits = rng.standard_normal((n_tokens, n_experts)).astype(np.float32)
    logits[1:, n_experts // 2] += 3
    rule, bias = _put_rule(device, logits, is_sigmoid)
    ids, weights = choose_experts(logits, bias, n_used, int(is_sigmoid), True, 1.5)
    given = Chosen(device.put(np.ascontiguousarray(ids)), device.put(np.ascontiguousarray(weights)))
    source, inputs = put_quantised(device, rng.standard_normal((n_tokens, n_embd)).astype(np.float32))
    start = rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    output, hidden = device.put(start), device.put(np.full(hidden_bytes(experts, n_tokens), 0xFF, np.uint8))
    choice = given if is_chosen else rule
    moe_few_vectors(device.launcher, experts, choice, source, n_tokens, hidden, output, accumulate=True)
    gate, up, down = (values.astype(np.float64) for _, values in made)
    expected = start.astype(np.float64)
    for token, slot in np.ndindex(n_tokens, n_used):
        expert = ids[token, slot]
        h = activate(np.asarray(gate[expert] @ inputs[token], np.float32), int(is_sigmoid))
        h = quantised_like_kernel((h * (up[expert] @ inputs[token]))[None], group=16)[0]
        expected[token] += weights[token, slot] * (down[expert] @ h)
    assert_near(device.get(output), expected, 2e-3, f"{names} T={n_tokens} {shape}")


def check_norm_and_route(device: Device, name: str, n_tokens: int, n_experts: int, cols: int) -> None:
    """Logits and codes against numpy; f32 all the way to both."""
    rng = np.random.default_rng(cols)
    matrix, w = make_matrix(device, rng, name, n_experts, cols)
    x, weights = activations(rng, n_tokens, cols), rng.uniform(0.5, 1.5, cols).astype(np.float32)
    logits = device.put(np.full((n_tokens, n_experts), np.nan, np.float32))
    groups = np.full((n_tokens, cols // 32), np.nan, np.float32)
    codes = device.put(np.zeros((n_tokens, cols), np.int8))
    normed = Activations(0, codes, device.put(groups), device.put(groups))
    norm = Norm(device.put(weights), 1e-6)
    norm_and_route(device.launcher, matrix, device.put(x), norm, n_tokens, logits, normed)
    expected = rms_norm(x, weights, 1e-6).astype(np.float64)
    assert_near(device.get(logits), expected @ w[0].T.astype(np.float64), 1e-5, f"{name} T={n_tokens} {cols}")
    scales = device.get(normed.scales).repeat(32, -1)
    rows = device.get(codes) * scales.astype(np.float64)
    assert (np.abs(rows - expected) <= scales * 0.501 + 1e-12).all()
    sums = rows.reshape(n_tokens, -1, 32).sum(-1)
    np.testing.assert_allclose(device.get(normed.sums), sums, rtol=1e-5, atol=1e-5)


def check_choice(device: Device, n_tokens: int, n_experts: int, n_used: int, is_sigmoid: bool) -> None:
    """The choice by a kernel of its own, for mixtures whose kernels are given it."""
    rng = np.random.default_rng(n_experts)
    logits = rng.standard_normal((n_tokens, n_experts)).astype(np.float32)
    rule, bias = _put_rule(device, logits, is_sigmoid)
    ids = device.put(np.full((n_tokens, n_used), -1, np.int32))
    weights = device.put(np.full((n_tokens, n_used), np.nan, np.float32))
    choose_on_device(device.launcher, rule, n_experts, n_used, n_tokens, ids, weights)
    expected_ids, expected = choose_experts(logits, bias, n_used, int(is_sigmoid), True, 1.5)
    assert (device.get(ids) == expected_ids).all()
    np.testing.assert_allclose(device.get(weights), expected, rtol=1e-5)
