"""Mixtures with experts of float types, for any number of tokens: activations are halves, never 8-bit codes."""

from __future__ import annotations

import numpy as np

from tests.cuda.devices import Device
from tests.cuda.matmul_checks import assert_near, make_matrix
from worker.cuda.linear import moe, moe_workspace_bytes
from worker.cuda.matmul import Activations
from worker.cuda.matmul_moe import Chosen, Experts
from worker.ops.reference import activate, choose_experts

HALVES_LIMIT = 2e-3  # of activations, weights and what is between: 2^-11 each


def check_float_experts(
    device: Device, names: tuple[str, str, str], n_tokens: int, shape: tuple[int, int, int, int]
) -> None:
    """gate, up and down types, one of them float; shape = n_embd, n_ff, experts, used."""
    n_embd, n_ff, n_experts, n_used = shape
    rng = np.random.default_rng(n_embd + n_tokens)
    sizes = ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff))
    made = [make_matrix(device, rng, name, *size, n_experts) for name, size in zip(names, sizes, strict=True)]
    (gate_matrix, gate), (up_matrix, up), (down_matrix, down) = made
    experts = Experts(gate_matrix, up_matrix, down_matrix, n_used, 0)
    x = rng.standard_normal((n_tokens, n_embd), np.float32) / np.float32(64)
    logits = rng.standard_normal((n_tokens, n_experts)).astype(np.float32)
    ids, weights = choose_experts(logits, None, n_used, 0, True, 1.0)
    choice = Chosen(device.put(np.ascontiguousarray(ids)), device.put(np.ascontiguousarray(weights)))
    start = rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    output = device.put(start)
    workspace = device.put(np.zeros(moe_workspace_bytes(experts, n_tokens), np.uint8))
    source = Activations(device.put(x))
    moe(device.launcher, experts, choice, source, n_tokens, output, workspace, accumulate=True)
    expected = start.astype(np.float64)
    for token, slot in np.ndindex(n_tokens, n_used):
        expert = ids[token, slot]
        h = activate(gate[expert] @ x[token], 0) * (up[expert] @ x[token])
        expected[token] += weights[token, slot] * (down[expert] @ h)
    assert_near(device.get(output), expected, HALVES_LIMIT, f"{names} T={n_tokens} {shape}")
