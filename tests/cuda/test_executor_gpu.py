"""The GPU executor on a real device against the numpy reference, with tiny models.

Tolerances: activations are rounded to 8 bits (decode) or 11 (prefill), keys and values to 11; on random weights of four
layers that leaves about 1 % of the logits' spread, and random weights damp nothing. What is right is far inside 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.errors import EngineStartError
from plans.placement import GPU_ONLY
from tests.cuda.executors import (
    GREEDY_WITH_TOP,
    SPLIT,
    decode,
    generate,
    load,
    placement,
    prompt,
    read_silently,
    reference_logits,
    relative_error,
    synthetic_model,
)
from tests.cuda.tolerances import rounding_bounds
from worker.cuda.device import gpu_absence
from worker.ops.batch import Batch
from worker.runtime.executor import CancelFlag, Output, Sampler, SequencePart, StepBatch, StepCancelled
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.load_gpu import load_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_absence() is not None, reason=f"no GPU: {gpu_absence()}"),
    pytest.mark.filterwarnings("default"),  # CuPy and its CUDA libraries warn about themselves
]
TOLERANCE = 0.05
N_VOCAB = 1024
PAGES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[GpuExecutor]:
    loaded = load(model)
    yield loaded
    loaded.close()


def _check(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert np.isfinite(actual).all(), (
        f"{what}: {np.count_nonzero(~np.isfinite(actual))} logits are not finite"
    )
    error = relative_error(actual, expected)
    per_row = [round(relative_error(a, e), 4) for a, e in zip(actual, expected, strict=True)]
    assert error < TOLERANCE, f"{what}: relative error {error:.4f}, by row {per_row}"


@pytest.mark.parametrize("length", [1, 3, 8, 9, 33, 64])
def test_prefill_matches_the_reference(executor: GpuExecutor, model: Path, length: int) -> None:
    batch = Batch.of_sequence(prompt(length, N_VOCAB), 0, PAGES[0], all_outputs=True)
    _check(executor.logits(batch), reference_logits(model, [batch])[0], f"{model.stem}, {length} tokens")


def test_later_chunks_and_decode_match_the_reference(executor: GpuExecutor, model: Path) -> None:
    ids = prompt(80, N_VOCAB)
    spans = [(0, 50), (50, 78), (78, 79), (79, 80)]
    batches = [Batch.of_sequence(ids[a:b], a, PAGES[1], all_outputs=False) for a, b in spans]
    for (a, b), batch, expected in zip(spans, batches, reference_logits(model, batches), strict=True):
        _check(executor.logits(batch), expected, f"{model.stem}, tokens {a} to {b}")


def test_chunks_of_a_prompt_want_no_answer(executor: GpuExecutor, model: Path) -> None:
    ids = prompt(80, N_VOCAB)
    batches = [Batch.of_sequence(ids[a:b], a, PAGES[1], all_outputs=False) for a, b in ((0, 60), (60, 80))]
    read_silently(executor, ids[:60], PAGES[1])
    _check(executor.logits(batches[1]), reference_logits(model, batches)[1], f"{model.stem}, a later chunk")


def test_mixed_batches_match_the_reference(executor: GpuExecutor, model: Path) -> None:
    ids = prompt(40, N_VOCAB)
    first = Batch.of_sequence(ids[:20], 0, PAGES[2], all_outputs=False)
    mixed = Batch(
        np.asarray([ids[20], *ids[:12]], np.int32),
        np.asarray([20, *range(12)], np.int32),
        np.asarray([0, 1, 13], np.int32),
        np.asarray([PAGES[2], PAGES[3]], np.int32),
        np.asarray([0, 5, 12], np.int32),
    )
    expected = reference_logits(model, [first, mixed])
    executor.logits(first)
    _check(executor.logits(mixed), expected[1], f"{model.stem}, one decoding beside a prompt of 12")


def test_one_graph_launch_per_token(executor: GpuExecutor) -> None:
    generate(executor, [prompt(5, N_VOCAB)], 3, PAGES[:1])
    before = executor.counters.graph_launches
    generate(executor, [prompt(5, N_VOCAB)], 9, PAGES[:1])
    assert executor.counters.graph_launches - before == 8


def test_greedy_output_repeats(executor: GpuExecutor) -> None:
    prompts = [prompt(12, N_VOCAB, seed) for seed in range(4)]
    alone = [generate(executor, [ids], 12, PAGES[:1])[0] for ids in prompts]
    again = [generate(executor, [ids], 12, PAGES[:1])[0] for ids in prompts]
    assert alone == again
    together = [generate(executor, prompts, 12, PAGES) for _ in range(2)]
    assert together[0] == together[1]


@pytest.fixture(scope="module")
def wide_executor(model: Path) -> Iterator[GpuExecutor]:
    """Compiles and captures as steps come."""
    loaded = load_gpu(model, placement(max_sequences=16), max_outputs=64, warms_up=False)
    yield loaded
    loaded.close()


def test_without_warm_up_the_first_steps_are_right_too(wide_executor: GpuExecutor, model: Path) -> None:
    ids = prompt(11, N_VOCAB)
    spans = [(0, 9), (9, 10), (10, 11)]
    batches = [Batch.of_sequence(ids[a:b], a, [40], all_outputs=True) for a, b in spans]
    for batch, expected in zip(batches, reference_logits(model, batches, n_pages=41), strict=True):
        _check(wide_executor.logits(batch), expected, f"{model.stem}, {len(batch.token_ids)} tokens")


@pytest.mark.parametrize("count", [2, 4, 16])
def test_company_changes_logits_by_rounding_only(wide_executor: GpuExecutor, model: Path, count: int) -> None:
    """Fed the same tokens, so that a near tie is not carried on. One row is multiplied as 8-bit codes, several may be
    as f16. Rows in which two experts were as good as tied, and rounding chose the other one, are few: half must be
    within what rounding does, and all together within the tolerance.
    """
    executor = wide_executor
    sequences = [prompt(24, N_VOCAB, seed) for seed in range(count)]
    for index, ids in enumerate(sequences):
        for page in (index, count + index):  # each side reads a cache that it wrote itself
            executor.logits(Batch.of_sequence(ids[:12], 0, [page], all_outputs=False))
    alone, together = [], []
    for position in range(12, 24):
        tokens = [ids[position] for ids in sequences]
        alone += [executor.logits(_side_by_side([t], position, i)) for i, t in enumerate(tokens)]
        together.append(executor.logits(_side_by_side(tokens, position, count)))
    actual, expected = np.concatenate(together), np.concatenate(alone)
    _check(actual, expected, f"{count} sequences against one at a time")
    rows = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert np.median(rows) < _rounding_bound(model, sequences[0]), [round(row, 4) for row in rows]


def _rounding_bound(model: Path, ids: list[int]) -> float:
    """Of decoded tokens, the mean over the positions from 12 on."""
    spans = [(0, 12), *((position, position + 1) for position in range(12, len(ids)))]
    batches = [Batch.of_sequence(ids[a:b], a, [0], all_outputs=False) for a, b in spans]
    return float(np.mean(rounding_bounds(model, batches, reference_logits(model, batches))[1:]))


def _side_by_side(tokens: list[int], position: int, first_page: int) -> Batch:
    """One token of each sequence, which has one page."""
    count = np.arange(len(tokens), dtype=np.int32)
    return Batch(
        np.asarray(tokens, np.int32),
        np.full(len(tokens), position, np.int32),
        np.arange(len(tokens) + 1, dtype=np.int32),
        (first_page + count)[:, None],
        count,
    )


def test_decode_of_several_sequences_matches_the_reference(executor: GpuExecutor, model: Path) -> None:
    """Through the graphs: log probabilities of the best tokens, all four sequences in one step."""
    prompts = [prompt(40, N_VOCAB, seed) for seed in range(4)]
    for ids, pages in zip(prompts, PAGES, strict=True):
        executor.logits(Batch.of_sequence(ids[:39], 0, pages, all_outputs=False))
    for _ in range(2):  # op by op, then from the graph
        answers = decode(executor, [[ids[39]] for ids in prompts], 39, PAGES, GREEDY_WITH_TOP)
    for ids, pages, answer in zip(prompts, PAGES, answers, strict=True):
        batch = Batch.of_sequence(ids, 0, pages, all_outputs=False)
        logits = reference_logits(model, [batch])[0][0].astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        tolerance = 4 * TOLERANCE * logits.std()
        assert answer.logprob == pytest.approx(logprobs[answer.id], abs=tolerance)
        assert [logprob for _, logprob in answer.top] == pytest.approx(
            np.sort(logprobs)[::-1][:5], abs=tolerance
        )


def test_sampling_settings_reach_the_device(executor: GpuExecutor) -> None:
    ids = prompt(6, N_VOCAB)
    forced = Sampler(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 7, (17,), (100.0,), 0)
    part = SequencePart(ids, 0, PAGES[0], (Output(5, forced),))
    assert executor.run(StepBatch((part,), 6, 1), CancelFlag())[0].id == 17
    asked = SequencePart(ids, 0, PAGES[0], (Output(2, target=5, top=3), Output(5, target=9)))
    answers = executor.run(StepBatch((asked,), 6, 2), CancelFlag())
    assert [answer.id for answer in answers] == [5, 9] and len(answers[0].top) == 3
    drawn = [
        [
            generate(executor, [ids], 8, PAGES[:1], Sampler(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed))[0]
            for seed in (1, 1, 2)
        ]
    ][0]
    assert drawn[0] == drawn[1] != drawn[2]


def test_cancelling_ends_a_chunk(executor: GpuExecutor) -> None:
    cancel = CancelFlag()
    cancel.set()
    part = SequencePart(prompt(64, N_VOCAB), 0, PAGES[0], (Output(63, GREEDY_WITH_TOP),))
    with pytest.raises(StepCancelled):
        executor.run(StepBatch((part,), 64, 1), cancel)


def test_copied_pages_hold_the_same(executor: GpuExecutor) -> None:
    ids = prompt(33, N_VOCAB)
    executor.logits(Batch.of_sequence(ids[:32], 0, [0, 1], all_outputs=False))
    executor.copy_page(0, 9)
    batches = [Batch.of_sequence(ids[32:], 32, pages, all_outputs=False) for pages in ([0, 1], [9, 10])]
    assert np.array_equal(executor.logits(batches[0]), executor.logits(batches[1]))


def test_a_split_model_matches_the_reference(model: Path) -> None:
    try:
        executor = load(model, placement(SPLIT))
    except EngineStartError as error:
        if "CPU kernels are missing" in str(error):
            pytest.skip(str(error))
        raise
    ids = prompt(34, N_VOCAB)
    batches = [Batch.of_sequence(ids[:33], 0, [0, 1], all_outputs=True)]
    batches.append(Batch.of_sequence(ids[33:], 33, [0, 1], all_outputs=True))
    for batch, expected in zip(batches, reference_logits(model, batches), strict=True):
        _check(executor.logits(batch), expected, f"{model.stem} split")
    executor.close()


def test_q8_0_cache(model: Path) -> None:
    executor = load(model, placement(GPU_ONLY, kv_type="q8_0"))
    batches = [Batch.of_sequence(prompt(40, N_VOCAB), 0, [0, 1], all_outputs=True)]
    batches.append(Batch.of_sequence([5], 40, [0, 1], all_outputs=True))
    for batch, expected in zip(batches, reference_logits(model, batches), strict=True):
        _check(executor.logits(batch), expected, f"{model.stem} q8_0")
    executor.close()


def test_memory_stays_below_the_cap(model: Path) -> None:
    with pytest.raises(EngineStartError, match="gpu0 .* would need"):
        load(model, placement(gpu_memory_mib=(100,)))
    executor = load(model, placement(gpu_memory_mib=(1024,)))
    need, taken = executor.models[0].need, executor.models[0].memory.taken
    assert taken["weights"] == need.weights and taken["kv"] == need.kv
    assert taken["workspace"] == pytest.approx(need.workspace, rel=0.01, abs=16384)
    executor.close()
