"""Rope with the KV write, decode and prefill attention, against the numpy reference.

Tolerances: f16 keys, values, queries and weights carry 2^-11 relative rounding each; results are weighted means of
values of size one, so errors stay near 1e-3.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.cache import TestCache
from tests.cuda.machine import Machine
from worker.cuda import attention
from worker.cuda.attention import DecodePlan
from worker.cuda.attention_values import FreshHeads, Heads, Rope, Scores
from worker.cuda.ops import Outputs
from worker.ops import reference

ROPES = [
    # heads, rope_dim, style, norms, q8
    (Heads(4, 2, 64), 64, 1, False, False),
    (Heads(3, 1, 80), 32, 0, False, False),
    (Heads(4, 4, 96), 96, 0, True, True),
    (Heads(8, 1, 128), 128, 1, True, False),
    (Heads(5, 5, 128), 64, 1, True, True),
    (Heads(4, 1, 256), 256, 1, True, True),
]


@pytest.mark.parametrize(("heads", "rope_dim", "style", "has_norms", "is_q8"), ROPES)
def test_rope_store(
    machine: Machine,
    rng: np.random.Generator,
    heads: Heads,
    rope_dim: int,
    style: int,
    has_norms: bool,
    is_q8: bool,
) -> None:
    lengths = [40, 9]
    cache = TestCache(machine, rng, heads, lengths, is_q8=is_q8)
    sequences = np.repeat(np.arange(2, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    n = len(positions)
    q = rng.standard_normal((n, heads.n_heads, heads.head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((n, heads.n_kv_heads, heads.head_dim)).astype(np.float32) for _ in range(2))
    k[3, 0, 5] = 80.0
    norms = [rng.standard_normal(heads.head_dim).astype(np.float32) for _ in range(2)]
    frequencies = (10000.0 ** (-np.arange(rope_dim // 2) / (rope_dim // 2))).astype(np.float32)
    put = machine.put
    q_norm, k_norm = (put(norm) if has_norms else 0 for norm in norms)
    rope = Rope(q_norm, k_norm, put(frequencies), rope_dim, style, 1e-6, 1.1)
    query = put(q)
    step = cache.step(positions, sequences)
    attention.rope_store(machine.launcher, query, put(k), put(v), n, heads, rope, cache.kv, step)

    if has_norms:
        q, k = reference.rms_norm(q, norms[0], 1e-6), reference.rms_norm(k, norms[1], 1e-6)
    q = reference.rotate(q, positions, frequencies, style, 1.1)
    k = reference.rotate(k, positions, frequencies, style, 1.1)
    np.testing.assert_allclose(machine.get(query), q, rtol=1e-5, atol=1e-5)
    for index, expected in enumerate((k, v)):
        stored = np.concatenate([cache.read(index, s) for s in range(2)])
        if is_q8:
            groups = np.abs(expected).reshape(n, heads.n_kv_heads, -1, 32).max(axis=-1) / 127
            bound = np.repeat(0.5 * groups, 32, axis=-1) + np.abs(expected) * 1e-3 + 1e-6
        else:
            bound = np.abs(expected) * 2.0**-10 + 1e-5
        assert (np.abs(stored - expected) <= bound).all()


def test_rope_far_out(machine: Machine, rng: np.random.Generator) -> None:
    """At position 120,001 the angle in f32 would be off by thousandths of a radian."""
    heads = Heads(2, 1, 64)
    cache = TestCache(machine, rng, heads, [32], is_q8=False)
    cache.tables = np.zeros((1, 4000), np.int32)
    cache.max_pages = 4000
    positions = np.array([120_001, 77_777], np.int32)
    q = rng.standard_normal((2, 2, 64)).astype(np.float32)
    key, value = (machine.put(np.ones((2, 1, 64), np.float32)) for _ in range(2))
    frequencies = (1e6 ** (-np.arange(32) / 32)).astype(np.float32)
    query = machine.put(q)
    rope = Rope(0, 0, machine.put(frequencies), 64, 1, 1e-6, 1.0)
    step = cache.step(positions, np.zeros(2, np.int32))
    attention.rope_store(machine.launcher, query, key, value, 2, heads, rope, cache.kv, step)
    expected = reference.rotate(q, positions, frequencies, 1, 1.0)
    np.testing.assert_allclose(machine.get(query), expected, atol=1e-5)


def expected_row(
    cache: TestCache, query: np.ndarray, position: int, sequence: int, scores: Scores
) -> np.ndarray:
    """query [heads, head_dim] -> [heads, head_dim]."""
    keys, values = (cache.read(index, sequence)[: position + 1] for index in range(2))
    visible = np.ones((1, position + 1), bool)
    if scores.window:
        visible[0, : max(0, position + 1 - scores.window)] = False
    return reference.attend(query[None], keys, values, visible, scores.scale, scores.cap)[0]


DECODES = [
    # heads, is_q8, window, cap, lengths
    (Heads(4, 2, 64), False, 0, 0.0, [1, 33, 200]),
    (Heads(7, 1, 64), True, 0, 0.0, [65, 300]),
    (Heads(2, 2, 80), False, 0, 0.0, [97, 2]),
    (Heads(6, 2, 96), True, 40, 0.0, [31, 150]),
    (Heads(8, 1, 128), False, 0, 0.0, [129, 64, 7]),
    (Heads(16, 2, 128), True, 0, 0.0, [170]),
    (Heads(20, 1, 128), False, 100, 30.0, [230, 90]),
    (Heads(8, 4, 256), False, 64, 50.0, [140, 33]),
    (Heads(4, 1, 256), True, 0, 0.0, [99]),
]
CUTS = [
    # splits (0: the planner's plan), warps, stages, blocks of a cluster
    (0, 0, 0, 0),
    (1, 4, 2, 1),
    (5, 4, 2, 1),
    (3, 2, 3, 1),
    (8, 4, 2, 8),
    (6, 8, 1, 2),
]


def plan_for(
    machine: Machine, heads: Heads, n_rows: int, splits: int, n_warps: int, n_stages: int, cluster: int
) -> DecodePlan:
    """The plan of a cut; for 0 splits what the planner says for 512 tokens."""
    if splits == 0:
        return attention.plan_decode(machine.launcher, heads, n_rows, 512)
    if cluster > 1 and machine.launcher.capability < 90:
        pytest.skip("clusters need a card of capability 9.0 or later")
    return DecodePlan(splits, min(heads.group, 16), n_warps, n_stages, cluster)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("heads", "is_q8", "window", "cap", "lengths"), DECODES)
def test_decode_attention(
    machine: Machine,
    rng: np.random.Generator,
    heads: Heads,
    is_q8: bool,
    window: int,
    cap: float,
    lengths: list[int],
    cut: tuple[int, ...],
) -> None:
    cache = TestCache(machine, rng, heads, lengths, is_q8=is_q8)
    cache.fill(rng)
    scores = Scores(2.0 / np.sqrt(heads.head_dim), cap, window)
    n = len(lengths)
    q = rng.standard_normal((n, heads.n_heads, heads.head_dim)).astype(np.float32)
    positions = np.array(lengths, np.int32) - 1
    plan = plan_for(machine, heads, n, *cut)
    width = heads.n_heads * heads.head_dim
    clear = np.full(attention.COUNTER_BYTES + attention.partial_bytes(heads, plan, n), 0xFF, np.uint8)
    clear[: attention.COUNTER_BYTES] = 0
    workspace = machine.put(clear)
    has_codes = heads.head_dim % 32 == 0
    outputs = Outputs(
        machine.empty((n, width)),
        machine.empty((n, width), np.float16),
        *(
            (
                machine.empty((n, width), np.int8),
                machine.empty((n, width // 32)),
                machine.empty((n, width // 32)),
            )
            if has_codes
            else ()
        ),
    )
    step = cache.step(positions, np.arange(n, dtype=np.int32))
    for _ in range(2):  # the second launch finds the counters as the first left them
        attention.decode_attention(
            machine.launcher, machine.put(q), n, heads, cache.kv, step, scores, plan, workspace, outputs
        )
    got = machine.get(outputs.values).reshape(q.shape)
    for row in range(n):
        expected = expected_row(cache, q[row], int(positions[row]), row, scores)
        np.testing.assert_allclose(got[row], expected, atol=4e-3, rtol=4e-3)
    if has_codes:
        scales = machine.get(outputs.scales)
        codes = machine.get(outputs.codes).reshape(n, -1, 32)
        values = got.reshape(n, -1, 32)
        assert (np.abs(codes * scales[..., None] - values) <= 0.5001 * scales[..., None]).all()


FUSED = [
    # heads, rope_dim, style, norms, q8, window
    (Heads(4, 2, 64), 64, 1, False, False, 0),
    (Heads(7, 1, 128), 64, 0, True, True, 70),
    (Heads(16, 2, 128), 128, 1, True, False, 0),
    (Heads(2, 2, 80), 80, 1, False, False, 40),
    (Heads(4, 1, 256), 256, 1, True, True, 0),
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("heads", "rope_dim", "style", "has_norms", "is_q8", "window"), FUSED)
def test_fused_decode_is_rope_then_attention(
    machine: Machine,
    rng: np.random.Generator,
    heads: Heads,
    rope_dim: int,
    style: int,
    has_norms: bool,
    is_q8: bool,
    window: int,
    cut: tuple[int, ...],
) -> None:
    """Equal to the bit to `rope_store` and `decode_attention` in turn, the cache included."""
    lengths = [1, 32, 33, 150]
    n, width = len(lengths), heads.n_heads * heads.head_dim
    kv_width = heads.n_kv_heads * heads.head_dim
    cache = TestCache(machine, rng, heads, lengths, is_q8=is_q8)
    cache.fill(rng)
    q, k, v = (rng.standard_normal((n, size)).astype(np.float32) for size in (width, kv_width, kv_width))
    norms = [rng.standard_normal(heads.head_dim).astype(np.float32) for _ in range(2)]
    q_norm, k_norm = (machine.put(norm) if has_norms else 0 for norm in norms)
    frequencies = (10000.0 ** (-np.arange(rope_dim // 2) / (rope_dim // 2))).astype(np.float32)
    rope = Rope(q_norm, k_norm, machine.put(frequencies), rope_dim, style, 1e-6, 1.0)
    step = cache.step(np.array(lengths, np.int32) - 1, np.arange(n, dtype=np.int32))
    plan = plan_for(machine, heads, n, *cut)
    workspace = machine.zeros(attention.COUNTER_BYTES + attention.partial_bytes(heads, plan, n))
    results = []
    for is_fused in (True, False):
        query, key, value = (machine.put(x) for x in (q, k, v))
        out = machine.empty((n, width))
        fresh = FreshHeads(rope, key, value) if is_fused else None
        if not is_fused:
            cache.clear_last(list(range(n)))
            attention.rope_store(machine.launcher, query, key, value, n, heads, rope, cache.kv, step)
        attention.decode_attention(
            machine.launcher,
            query,
            n,
            heads,
            cache.kv,
            step,
            Scores(0.1, 0.0, window),
            plan,
            workspace,
            Outputs(out),
            fresh=fresh,
        )
        stored = [cache.read(index, s) for index in range(2) for s in range(n)]
        results.append((machine.get(out), *stored))
    for fused, apart in zip(*results, strict=True):
        np.testing.assert_array_equal(fused, apart)


PREFILLS = [
    # heads, is_q8, window, cap, (prefix, tokens) of the sequences
    (Heads(2, 1, 64), False, 0, 0.0, [(0, 150), (3, 5)]),
    (Heads(1, 1, 80), False, 0, 0.0, [(100, 40)]),
    (Heads(2, 2, 96), True, 50, 0.0, [(20, 140)]),
    (Heads(2, 1, 128), False, 0, 0.0, [(0, 129), (64, 64), (200, 1)]),
    (Heads(1, 1, 128), True, 0, 20.0, [(33, 130)]),
    (Heads(2, 1, 256), False, 40, 50.0, [(10, 100)]),
]


@pytest.mark.parametrize(("heads", "is_q8", "window", "cap", "parts"), PREFILLS)
def test_prefill_attention(
    machine: Machine,
    rng: np.random.Generator,
    heads: Heads,
    is_q8: bool,
    window: int,
    cap: float,
    parts: list[tuple[int, int]],
) -> None:
    cache = TestCache(machine, rng, heads, [prefix + count for prefix, count in parts], is_q8=is_q8)
    cache.fill(rng)
    scores = Scores(2.0 / np.sqrt(heads.head_dim), cap, window)
    positions = np.concatenate([np.arange(p, p + c, dtype=np.int32) for p, c in parts])
    sequences = np.repeat(np.arange(len(parts), dtype=np.int32), [c for _, c in parts])
    first = np.cumsum([0, *(c for _, c in parts)]).astype(np.int32)
    n, width = len(positions), heads.n_heads * heads.head_dim
    q = rng.standard_normal((n, heads.n_heads, heads.head_dim)).astype(np.float32)
    tiles = attention.prefill_tiles(first, positions, attention.prefill_tile_rows(heads))
    outputs = Outputs(machine.empty((n, width)), machine.empty((n, width), np.float16))
    step = cache.step(positions, sequences)
    attention.prefill_attention(
        machine.launcher,
        machine.put(q),
        machine.put(tiles),
        len(tiles),
        heads,
        cache.kv,
        step,
        scores,
        outputs,
    )
    got = machine.get(outputs.values).reshape(q.shape)
    for row in range(n):
        expected = expected_row(cache, q[row], int(positions[row]), int(sequences[row]), scores)
        np.testing.assert_allclose(got[row], expected, atol=5e-3, rtol=5e-3, err_msg=f"row {row}")
    halves = machine.get(outputs.halves).reshape(q.shape)
    np.testing.assert_array_equal(halves, got.astype(np.float16))
