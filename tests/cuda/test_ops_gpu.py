"""Element-wise kernels, rope and router against the numpy reference: odd shapes, outliers, fresh random data."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.cpu.quant_data import ALL_TYPES, dequantize, random_weights
from tests.cuda.machine import Machine
from worker.cuda import ops, router
from worker.ops import reference


def with_outliers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal values; one in fifty is up to 300 times as large, some rows hold only zeros."""
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.02] *= 300
    x[rng.random(shape[0]) < 0.1] = 0
    return x


class Results:
    """All three forms of an output [tokens, width], and their checks."""

    def __init__(self, machine: Machine, tokens: int, width: int) -> None:
        self.machine, self.shape = machine, (tokens, width)
        self.groups = (tokens, width // 32)
        has_groups = width % 32 == 0
        self.outputs = ops.Outputs(
            machine.empty((tokens, width)),
            machine.empty((tokens, width), np.float16),
            machine.empty((tokens, width), np.int8) if has_groups else 0,
            machine.empty(self.groups) if has_groups else 0,
            machine.empty(self.groups) if has_groups else 0,
        )

    def values(self) -> np.ndarray:
        return self.machine.get(self.outputs.values)

    def check(self, expected: np.ndarray, rtol: float = 2e-6, atol: float = 1e-6) -> None:
        """f32 sums in another order differ by some roundings of the largest part: hence `atol` by the row's scale."""
        values = self.values()
        scale = np.abs(expected).max(axis=-1, keepdims=True) + 1e-30
        np.testing.assert_allclose(values / scale, expected / scale, rtol=rtol, atol=atol)
        halves = np.clip(values, -65504, 65504).astype(np.float16)
        np.testing.assert_array_equal(self.machine.get(self.outputs.halves), halves)
        if self.outputs.codes:
            self._check_codes(values)

    def _check_codes(self, values: np.ndarray) -> None:
        groups = values.reshape(*self.groups, 32)
        scales = self.machine.get(self.outputs.scales)
        codes = self.machine.get(self.outputs.codes).reshape(groups.shape)
        np.testing.assert_allclose(scales, np.abs(groups).max(axis=-1) / 127, rtol=1e-6)
        assert (np.abs(codes * scales[..., None] - groups) <= 0.5001 * scales[..., None]).all()
        sums = codes.astype(np.int32).sum(axis=-1) * scales
        np.testing.assert_allclose(self.machine.get(self.outputs.sums), sums, rtol=1e-6)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_embedding_rows_are_the_files_values(
    machine: Machine, rng: np.random.Generator, kind: gguf.GGMLQuantizationType
) -> None:
    width, rows = 768, 40
    file = random_weights(rng, kind, rows, width)
    ids = rng.integers(0, rows, 7).astype(np.int32)
    output = machine.empty((7, width))
    table = ops.FileRows(int(kind), machine.put(file), file.shape[1], width)
    ops.embed(machine.launcher, table, machine.put(ids), 7, 1.5, output)
    expected = dequantize(file, kind)[ids] * np.float32(1.5)
    np.testing.assert_array_equal(machine.get(output), expected)


@pytest.mark.parametrize("width", [32, 100, 257])
def test_select_rows(machine: Machine, rng: np.random.Generator, width: int) -> None:
    source = with_outliers(rng, 9, width)
    rows = np.array([8, 0, 3, 3], np.int32)
    output = machine.empty((4, width))
    ops.select_rows(machine.launcher, machine.put(source), machine.put(rows), 4, width, output)
    np.testing.assert_array_equal(machine.get(output), source[rows])


@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 32), (3, 576), (1, 2048), (40, 640), (2, 4096), (2, 97), (1, 1537), (33, 2560)]
)
def test_rms_norm(machine: Machine, rng: np.random.Generator, tokens: int, width: int) -> None:
    x, weight = with_outliers(rng, tokens, width), rng.standard_normal(width).astype(np.float32)
    results = Results(machine, tokens, width)
    ops.rms_norm(machine.launcher, machine.put(x), machine.put(weight), tokens, width, 1e-6, results.outputs)
    results.check(reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [64, 99, 5120])
def test_rms_norm_adds_to_its_output_and_picks_rows(
    machine: Machine, rng: np.random.Generator, width: int
) -> None:
    x, weight = with_outliers(rng, 6, width), rng.standard_normal(width).astype(np.float32)
    old = rng.standard_normal((2, width)).astype(np.float32)
    rows = np.array([5, 1], np.int32)
    results = Results(machine, 2, width)
    values = machine.put(old)
    outputs = ops.Outputs(values, results.outputs.halves)
    ops.rms_norm(
        machine.launcher,
        machine.put(x),
        machine.put(weight),
        2,
        width,
        1e-5,
        outputs,
        accumulate=True,
        rows=machine.put(rows),
    )
    expected = old + reference.rms_norm(x[rows], weight, 1e-5)
    np.testing.assert_allclose(machine.get(values), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "width"), [(1, 32), (5, 96), (7, 1024), (3, 50)])
def test_convert(machine: Machine, rng: np.random.Generator, tokens: int, width: int) -> None:
    x = with_outliers(rng, tokens, width) * np.float32(500)
    results = Results(machine, tokens, width)
    ops.convert(machine.launcher, machine.put(x), tokens, width, results.outputs)
    results.check(x, rtol=0, atol=0)


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 1536), (2, 33)])
def test_glu(machine: Machine, rng: np.random.Generator, tokens: int, width: int, activation: int) -> None:
    gate, up = (with_outliers(rng, tokens, width) for _ in range(2))
    results = Results(machine, tokens, width)
    ops.glu(machine.launcher, machine.put(gate), machine.put(up), tokens, width, activation, results.outputs)
    with np.errstate(over="ignore"):  # exp of an outlier: the quotient is 0, as it should be
        expected = reference.activate(gate, activation) * up
    results.check(expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 31, 4096, 10001])
def test_add_and_soft_cap(machine: Machine, rng: np.random.Generator, count: int) -> None:
    a, b = (with_outliers(rng, count, 1).ravel() for _ in range(2))
    target = machine.put(b)
    ops.add(machine.launcher, machine.put(a), target, count)
    np.testing.assert_array_equal(machine.get(target), a + b)
    ops.scale_and_cap(machine.launcher, target, count, 0.5, 30.0)
    capped = 30 * np.tanh((a + b) * 0.5 / 30)
    np.testing.assert_allclose(machine.get(target), capped, rtol=1e-5, atol=1e-5)


ROUTERS = [
    # tokens, width, experts, used, gating, bias, normalize
    (1, 2048, 128, 8, 0, False, True),
    (3, 64, 8, 2, 0, False, True),
    (5, 100, 60, 4, 0, False, False),
    (2, 256, 256, 8, 1, True, True),
    (1, 128, 300, 6, 1, False, True),
    (70, 68, 96, 8, 0, True, True),
    (65, 256, 5, 5, 1, True, False),
]


@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize(("tokens", "width", "experts", "used", "gating", "has_bias", "normalize"), ROUTERS)
def test_router(
    machine: Machine,
    rng: np.random.Generator,
    tokens: int,
    width: int,
    experts: int,
    used: int,
    gating: int,
    has_bias: bool,
    normalize: bool,
    is_f16: bool,
) -> None:
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    matrix = rng.standard_normal((experts, width)).astype(np.float16 if is_f16 else np.float32)
    matrix *= np.float16(3 / np.sqrt(width)) if is_f16 else np.float32(3 / np.sqrt(width))
    bias = 0.1 * rng.standard_normal(experts).astype(np.float32) if has_bias else None
    choice = router.Router(
        machine.put(matrix),
        is_f16,
        0 if bias is None else machine.put(bias),
        experts,
        used,
        width,
        gating,
        normalize,
        1.25,
    )
    ids, weights = machine.empty((tokens, used), np.int32), machine.empty((tokens, used))
    workspace = machine.zeros(router.workspace_bytes(tokens, experts))
    for _ in range(2):  # the second call finds the counters as the first left them
        router.route(machine.launcher, choice, machine.put(x), tokens, ids, weights, workspace)
    logits = (x.astype(np.float64) @ matrix.astype(np.float64).T).astype(np.float32)
    wanted_ids, wanted = reference.choose_experts(logits, bias, used, gating, normalize, 1.25)
    np.testing.assert_array_equal(machine.get(ids), wanted_ids)
    np.testing.assert_allclose(machine.get(weights), wanted, rtol=2e-5)


def test_equal_scores_go_to_the_lower_expert(machine: Machine) -> None:
    x = np.ones((1, 4), np.float32)
    matrix = np.zeros((16, 4), np.float32)
    matrix[[3, 9, 12]] = 1
    choice = router.Router(machine.put(matrix), False, 0, 16, 5, 4, 0, True, 1.0)
    ids, weights = machine.empty((1, 5), np.int32), machine.empty((1, 5))
    router.route(
        machine.launcher,
        choice,
        machine.put(x),
        1,
        ids,
        weights,
        machine.zeros(router.workspace_bytes(1, 16)),
    )
    assert machine.get(ids)[0].tolist() == [3, 9, 12, 0, 1]
