"""Rotary positions, the key/value cache and attention, against float64 over what the cache really holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from configs.errors import EngineError
from tests.cpu.steps import Case, batch_of, pages_for
from worker.cpu.handles import KvCache, Step, Team
from worker.cpu.library import Library
from worker.cpu.structs import KvType
from worker.ops.batch import PAGE_TOKENS
from worker.ops.oplist import KvLayer, OpKind

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    rope_dim: int = 64
    style: int = 1
    window_tokens: int = 0
    softcap: float = 0.0
    norms: bool = False
    magnitude: float = 1.0


class AttentionCase:
    """q, k and v of row i belong to token id i; one layer of cache, rotation and attention."""

    def __init__(self, library: Library, rng: np.random.Generator, shape: Shape, n_rows: int) -> None:
        self.case, self.shape = Case(library, rng), shape
        self.case.kv_layers.append(KvLayer(shape.n_kv_heads, shape.head_dim))
        widths = (shape.n_heads * shape.head_dim, *2 * (shape.n_kv_heads * shape.head_dim,))
        self.rows = [rng.standard_normal((n_rows, width), np.float32) for width in widths]
        self.query, self.key, self.value = (self.case.given(rows) for rows in self.rows)
        self.frequencies = (10000.0 ** -(np.arange(shape.rope_dim // 2) * 2 / shape.rope_dim)).astype(
            np.float32
        )
        self.norms = [rng.uniform(0.5, 1.5, shape.head_dim).astype(np.float32) for _ in range(2)]
        norm_ids = tuple(self.case.vector(norm) if shape.norms else -1 for norm in self.norms)
        heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
        self.case.add(
            OpKind.ROPE_STORE,
            inputs=(self.query, self.key, self.value),
            weights=(*norm_ids, self.case.vector(self.frequencies)),
            ints=(*heads, shape.rope_dim, shape.style, 0),
            floats=(EPS, shape.magnitude),
        )
        self.out = self.case.buffer(widths[0])
        self.scale = shape.head_dim**-0.5
        self.case.add(
            OpKind.ATTENTION,
            inputs=(self.query,),
            outputs=(self.out,),
            ints=(*heads, 0, 0, 0, shape.window_tokens),
            floats=(self.scale, shape.softcap),
        )

    def step(self, team: Team, kv: KvCache, max_tokens: int) -> Step:
        return self.case.step(team, kv, max_tokens)

    def run(self, step: Step, chunk: range, pages: list[int], n_threads: int) -> np.ndarray:
        """Attention of tokens `chunk` (ids = positions), f32 [n, heads * head_dim]."""
        _, native = batch_of([(list(chunk), chunk.start, pages)], outputs=[])
        assert step.run(native.struct, n_threads)
        return step.buffer(self.out)[: len(chunk)]

    def held(self, kv: KvCache, n: int, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """What the cache holds of n positions: keys and values, each f64 [n, kv_heads, head_dim]."""
        slots = [(pages[p // PAGE_TOKENS], p % PAGE_TOKENS) for p in range(n)]
        heads = range(self.shape.n_kv_heads)
        pairs = np.array([[kv.read(0, head, *slot) for head in heads] for slot in slots], np.float64)
        return pairs[:, :, 0], pairs[:, :, 1]

    def truth(self, keys: np.ndarray, values: np.ndarray, query: np.ndarray, position: int) -> np.ndarray:
        """float64 attention of one rotated query row over the cache's own keys and values."""
        shape = self.shape
        oldest = max(0, position - shape.window_tokens + 1) if shape.window_tokens else 0
        seen = slice(oldest, position + 1)
        heads = query.reshape(shape.n_kv_heads, -1, shape.head_dim).astype(np.float64)
        scores = np.einsum("kgd,tkd->kgt", heads, keys[seen]) * self.scale
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("kgt,tkd->kgd", weights / weights.sum(-1, keepdims=True), values[seen]).reshape(-1)


SHAPES = [
    Shape(),
    Shape(n_heads=9, n_kv_heads=3),
    Shape(n_heads=7, n_kv_heads=1, head_dim=128, rope_dim=128),
    Shape(n_heads=3, n_kv_heads=3, head_dim=80, rope_dim=32, style=0),
    Shape(n_heads=16, n_kv_heads=1, head_dim=16, rope_dim=16, style=0),
    Shape(n_heads=4, n_kv_heads=1, head_dim=256, rope_dim=256, norms=True, window_tokens=20),
    Shape(n_heads=2, n_kv_heads=2, head_dim=96, rope_dim=96, softcap=5.0, magnitude=1.1),
    Shape(n_heads=24, n_kv_heads=2, head_dim=48, rope_dim=24, norms=True, window_tokens=300),
]


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_against_float64(
    library: Library,
    level: str,
    team: Team,
    rng: np.random.Generator,
    shape: Shape,
    kv_type: KvType,
) -> None:
    n, n_threads = 570, 1 + 2 * (kv_type == KvType.F16)
    case = AttentionCase(library, rng, shape, n)
    pages = [int(page) for page in rng.permutation(n // PAGE_TOKENS + 3)]
    kv = case.case.kv(len(pages), kv_type)
    step = case.step(team, kv, n)
    chunks = [range(1), range(1, 259), range(259, 260), range(260, n - 1), range(n - 1, n)]
    results = [(case.run(step, chunk, pages, n_threads), step.buffer(case.query)) for chunk in chunks]
    keys, values = case.held(kv, n, pages)
    for chunk, (got, query) in zip(chunks, results, strict=True):
        for row in {0, len(chunk) // 2, len(chunk) - 1}:
            expected = case.truth(keys, values, query[row], chunk[row])
            np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_and_what_the_cache_holds(
    library: Library, level: str, team: Team, rng: np.random.Generator, shape: Shape
) -> None:
    """The reference's rotated queries and keys; f16 and q8_0 within half a step of theirs."""
    n = 40
    case = AttentionCase(library, rng, shape, n)
    first = 10000
    batch, native = batch_of([(list(range(n)), first, pages_for(first + n))], outputs=[])
    reference = case.case.reference(len(batch.page_tables[0]))
    with pytest.raises(KeyError):
        reference.run(batch)  # there are no logits in this list
    for kv_type in KvType:
        kv = case.case.kv(len(batch.page_tables[0]), kv_type)
        step = case.step(team, kv, n)
        assert step.run(native.struct, 2)
        np.testing.assert_allclose(
            step.buffer(case.query)[:n], reference.buffers[case.query], rtol=0, atol=3e-6
        )
        for token in range(0, n, 7):
            slot = first + token
            for head in range(shape.n_kv_heads):
                key, value = kv.read(0, head, slot // PAGE_TOKENS, slot % PAGE_TOKENS)
                for got, expected in (
                    (key, reference.keys[0][slot, head]),
                    (value, reference.values[0][slot, head]),
                ):
                    limit = np.abs(expected).max() * (2**-11 if kv_type == KvType.F16 else 0.503 / 127) + 4e-6
                    assert np.abs(got - expected).max() <= limit


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [Shape(n_heads=9, n_kv_heads=3), Shape(window_tokens=100)], ids=str)
def test_same_bits_for_any_chunks_threads_and_pages(
    library: Library, level: str, team: Team, rng: np.random.Generator, shape: Shape, kv_type: KvType
) -> None:
    n = 700
    case = AttentionCase(library, rng, shape, n)
    whole = None
    for n_threads, cuts in [(1, []), (2, [1, 2, 33, 300, 301]), (4, [512, 699]), (3, list(range(600, n)))]:
        pages = [int(page) for page in rng.permutation(n // PAGE_TOKENS + 1)]
        step = case.step(team, kv := case.case.kv(len(pages), kv_type), n)
        bounds = [0, *cuts, n]
        parts = [
            case.run(step, range(a, b), pages, n_threads) for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        got = np.concatenate(parts)
        whole = got if whole is None else whole
        np.testing.assert_array_equal(got, whole)
        kv.close()


@pytest.mark.parametrize("window_tokens", [0, 700])
def test_long_contexts(
    library: Library, level: str, team: Team, rng: np.random.Generator, window_tokens: int
) -> None:
    """Nine splits: prefill, then decoding with the splits on one and on several threads."""
    n = 2300
    shape = Shape(n_heads=3, n_kv_heads=1, head_dim=32, rope_dim=32, window_tokens=window_tokens)
    case = AttentionCase(library, rng, shape, n)
    pages = pages_for(n)
    kv = case.case.kv(len(pages))
    step = case.step(team, kv, n)
    whole = case.run(step, range(n), pages, 3)
    query = step.buffer(case.query)
    keys, values = case.held(kv, n, pages)
    for row in (0, 255, 256, 1700, n - 1):
        np.testing.assert_allclose(
            whole[row], case.truth(keys, values, query[row], row), rtol=2e-5, atol=1e-5
        )
    for n_threads in (1, 2, 4):
        for row in (n - 2, n - 1):
            np.testing.assert_array_equal(
                case.run(step, range(row, row + 1), pages, n_threads)[0], whole[row]
            )


def test_mixed_batch_gives_the_same_bits_as_each_alone(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    shape = Shape(n_heads=6, n_kv_heads=2)
    case = AttentionCase(library, rng, shape, 400)
    kv = case.case.kv(64)
    step = case.step(team, kv, 400)
    alone, mixed = [], []
    lengths = [3, 290, 33, 1, 64]
    for index, length in enumerate(lengths):
        pages = pages_for(length + 1, index * 10)
        case.run(step, range(length), pages, 1)
        alone.append(case.run(step, range(length, length + 1), pages, 1))
    sequences = [([length], length, pages_for(length + 1, i * 10)) for i, length in enumerate(lengths)]
    sequences[2] = (list(range(33)), 0, pages_for(33, 50))  # a prefill amid the decodes
    for n_threads in (1, 2, 4):
        _, native = batch_of(sequences, outputs=[])
        assert step.run(native.struct, n_threads)
        mixed = step.buffer(case.out)[: 4 + 33]
        np.testing.assert_array_equal(mixed[[0, 1, 35, 36]], np.concatenate([alone[i] for i in (0, 1, 3, 4)]))


def test_a_copied_page_is_the_page(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    case = AttentionCase(library, rng, Shape(), 80)
    for kv_type in KvType:
        kv = case.case.kv(8, kv_type)
        step = case.step(team, kv, 80)
        expected = case.run(step, range(80), [0, 1, 2], 1)[79]
        kv.copy_page(1, 5)
        kv.copy_page(2, 6)
        again = case.run(step, range(79, 80), [0, 5, 6], 1)[0]
        np.testing.assert_array_equal(again, expected)


def test_stale_slots_of_a_page_do_not_matter(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    case = AttentionCase(library, rng, Shape(), 64)
    kv = case.case.kv(2)
    step = case.step(team, kv, 64)
    fresh = case.run(step, range(40), [0, 1], 1)
    case.run(step, range(64), [1, 0], 1)  # fill both pages with other tokens
    np.testing.assert_array_equal(case.run(step, range(40), [0, 1], 1), fresh)


def test_values_beyond_f16_are_kept_finite(
    library: Library, level: str, team: Team, rng: np.random.Generator
) -> None:
    case = AttentionCase(library, rng, Shape(), 4)
    for values in case.case.values[1:3]:
        values[:] = 1e30
    for kv_type in KvType:
        step = case.step(team, case.case.kv(1, kv_type), 4)
        assert np.isfinite(case.run(step, range(4), [0], 1)).all()


def test_cache_sizes_and_refusals(library: Library) -> None:
    kv = library.kv_create(KvType.F16, [3, 1], [64, 128], 4)
    assert kv.page_bytes == PAGE_TOKENS * 2 * 2 * (3 * 64 + 128)
    assert library.kv_create(KvType.Q8_0, [3], [64], 4).page_bytes == PAGE_TOKENS * 2 * 3 * (64 + 2 * 2)
    with pytest.raises(EngineError, match="pages 0..3"):
        kv.copy_page(0, 4)
    with pytest.raises(EngineError, match="no such place"):
        kv.read(2, 0, 0, 0)
    with pytest.raises(EngineError, match="multiple of 16"):
        library.kv_create(KvType.F16, [1], [40], 4)
    with pytest.raises(EngineError, match="at least one"):
        library.kv_create(KvType.F16, [1], [64], 0)
