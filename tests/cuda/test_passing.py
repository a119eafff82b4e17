"""Layers of the CPU whose larger steps a GPU computes, with the GPU's stand-in on the host.

Checked are the answers, the caches on both sides, and the order in which weights and pages come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from configs.errors import EngineStartError
from plans.placement import CPU_ONLY, GPU_ONLY, Assignment
from tests.cuda.emulated_model import emulated_kernels
from tests.cuda.executors import GREEDY_WITH_TOP, SPLIT, load, placement, prompt, reference_logits
from tests.cuda.executors import synthetic_model as tiny_model
from tests.cuda.host_device import HostDevice
from tests.cuda.numpy_kernels import NumpyKernels
from worker.cpu.library import built_library_path
from worker.cuda import passing
from worker.cuda.upload import Part
from worker.ops.batch import Batch
from worker.runtime.executor import CancelFlag, Output, SequencePart, StepBatch, StepCancelled, StepFailed
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.gpu_passing import PassingSection

N_VOCAB, FEWEST = 1024, 8
CLOSE = 0.05
PAGES, OTHER_PAGES = [2, 0, 5], [1, 4, 3]
LAST_TWO = tuple(Assignment(units, "gpu0", "gpu0") for units in ("layer.2.*", "layer.3.*", "head"))
FIRST_TWO_PASS = (*CPU_ONLY, *LAST_TWO)
MIDDLE_PASSES = SPLIT
TWO_PASS = (
    *CPU_ONLY,
    Assignment("layer.1.*", "gpu0", "gpu0"),
    Assignment("layer.3.*", "gpu0", "gpu0"),
    Assignment("head", "gpu0", "gpu0"),
)


@pytest.fixture(autouse=True)
def cpu_kernels() -> None:
    try:
        built_library_path()
    except EngineStartError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.cuda.weights.PASSING_PART_BYTES", 5000)


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"), request.param)


def on_host(
    path: Path, assignments: tuple[Assignment, ...], **changes: Any
) -> tuple[GpuExecutor, HostDevice]:
    device, kernels = HostDevice(), changes.pop("kernels", NumpyKernels)
    place = placement(assignments, passing_tokens=FEWEST, **changes)
    return load(path, place, make_device=lambda _: device, make_kernels=kernels), device


def run(executor: GpuExecutor, *spans: tuple[list[int], int, list[int]]) -> list[NDArray[np.float64]]:
    """One step of several sequences (ids, first position, pages); the best log probabilities behind each one's last."""
    parts = tuple(
        SequencePart(ids, first, pages, (Output(len(ids) - 1, GREEDY_WITH_TOP),))
        for ids, first, pages in spans
    )
    answers = executor.run(StepBatch(parts, sum(len(ids) for ids, _, _ in spans), len(parts)), CancelFlag())
    found = []
    for answer in answers:
        logprobs = np.full(N_VOCAB, np.nan)
        for token, logprob in answer.top:
            logprobs[token] = logprob
        found.append(logprobs)
    return found


def expected(path: Path, ids: list[int]) -> NDArray[np.float64]:
    batch = Batch.of_sequence(ids, 0, [0, 1, 2], all_outputs=False)
    logits = reference_logits(path, [batch])[0][0].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def error(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """The largest of the known log probabilities, against the spread of all."""
    known = np.isfinite(found)
    assert known.sum() >= 5
    return float(np.abs(found[known] - wanted[known]).max() / wanted.std())


def assert_close(errors: list[float]) -> None:
    """The CPU's layers round activations to 8 bits; one step may choose another expert that is as good as even."""
    *others, worst = sorted(errors)
    assert max(others, default=worst) < CLOSE and worst < 4 * CLOSE, errors


@pytest.mark.parametrize("assignments", [FIRST_TWO_PASS, MIDDLE_PASSES, TWO_PASS])
def test_prompts_pass_and_decode_goes_on_with_their_cache(
    model: Path, assignments: tuple[Assignment, ...]
) -> None:
    executor, device = on_host(model, assignments)
    ids = prompt(60, N_VOCAB)
    steps = [(0, 20), (20, 44), (44, 48), (48, 49), (49, 59), (59, 60)]  # long ones pass, short ones do not
    errors: list[float] = []
    for begin, end in steps:
        moved = device.log.count("move_pages")
        (found,) = run(executor, (ids[begin:end], begin, PAGES))
        errors.append(error(found, expected(model, ids[:end])))
        assert (device.log.count("move_pages") > moved) == (end - begin >= FEWEST)
    assert_close(errors)
    executor.close()


def test_a_mixed_step_takes_the_cache_of_every_sequence_along(model: Path) -> None:
    executor, _ = on_host(model, FIRST_TWO_PASS)
    first, second = prompt(40, N_VOCAB), prompt(30, N_VOCAB, 9)
    run(executor, (first[:39], 0, PAGES))
    both = run(executor, (first[39:], 39, PAGES), (second, 0, OTHER_PAGES))
    assert_close(
        [error(found, expected(model, ids)) for found, ids in zip(both, (first, second), strict=True)]
    )
    executor.close()


def test_a_cancelled_step_leaves_the_next_one_right(model: Path) -> None:
    executor, device = on_host(model, TWO_PASS)
    ids = prompt(20, N_VOCAB)
    (section, *_) = [item for item in executor.sections if isinstance(item, PassingSection)]
    cancel, launch = CancelFlag(), section._layers[0].launches[0]
    object.__setattr__(launch, "enqueue", during(launch.enqueue, cancel))
    with pytest.raises(StepCancelled):
        executor.run(StepBatch((SequencePart(ids, 0, PAGES, (Output(19, GREEDY_WITH_TOP),)),), 20, 1), cancel)
    (found,) = run(executor, (ids, 0, PAGES))
    assert error(found, expected(model, ids)) < CLOSE
    executor.close()


def during(enqueue: Any, cancel: CancelFlag) -> Any:
    def setting(shape: Any) -> None:
        cancel.set()
        enqueue(shape)

    return setting


def test_a_file_that_shrinks_fails_the_step_with_words(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "tiny-dense")
    executor, _ = on_host(path, FIRST_TWO_PASS)
    section = executor.sections[0]
    assert isinstance(section, PassingSection) and section.model.passing is not None

    def shrunk(part: int) -> None:
        raise OSError("the model file ended early")

    section.model.passing._feed.await_part = shrunk  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(
            StepFailed, match="weights on their way to the device: the model file ended early"
        ):
            run(executor, (prompt(20, N_VOCAB), 0, PAGES))
    executor.close()


def test_one_place_holds_the_largest_layer_and_is_predicted(model: Path) -> None:
    executor, device = on_host(model, FIRST_TWO_PASS)
    need, taken = executor.models[0].need, executor.models[0].memory.taken
    assert (need.weights, need.kv, need.workspace) == (taken["weights"], taken["kv"], taken["workspace"])
    alone = load(
        model, placement(FIRST_TWO_PASS), make_device=lambda _: HostDevice(), make_kernels=NumpyKernels
    )
    own = alone.models[0].need
    assert own.weights < need.weights < 2 * own.weights, (
        "half of the layers, and one more with rows to look up"
    )
    assert need.kv == pytest.approx(1.5 * own.kv, rel=0.01)
    executor.close()
    alone.close()
    assert not device.pinned


def test_real_kernels_take_pages_and_weights_along(model: Path) -> None:
    """The kernels themselves, compiled for the CPU; of the first chunk nothing is wanted."""
    executor, _ = on_host(model, FIRST_TWO_PASS, kernels=emulated_kernels)
    ids = prompt(40, N_VOCAB)
    assert executor.run(StepBatch((SequencePart(ids[:10], 0, PAGES, ()),), 10, 0), CancelFlag()) == []
    steps = [run(executor, (ids[begin:end], begin, PAGES))[0] for begin, end in ((10, 35), (35, 36))]
    assert_close(
        [error(found, expected(model, ids[:end])) for found, end in zip(steps, (35, 36), strict=True)]
    )
    executor.close()


def test_everything_on_the_gpu_has_nothing_to_pass(tmp_path: Path) -> None:
    executor, device = on_host(tiny_model(tmp_path, "tiny-dense"), GPU_ONLY)
    assert executor.models[0].passing is None and not device.pinned
    executor.close()


def test_a_round_that_ends_early_passes_unused() -> None:
    """What is awaited and released stays in the order of the feed."""
    device = HostDevice()
    calls: list[tuple[str, int]] = []

    class Feed:
        def await_part(self, part: int) -> None:
            calls.append(("await", part))

        def release(self, buffer: int) -> None:
            calls.append(("release", buffer))

        def end(self) -> None:
            calls.append(("end", 0))

    device.feed = lambda plan: Feed()  # type: ignore[method-assign,assignment,return-value]

    def part(layer: int) -> Part:
        return Part(0, 0, 16, lay_out=lambda raw: calls.append(("lay out", layer)))

    weights = passing.PassingWeights(device, [__file__], {3: [part(3)] * 2, 7: [part(7)]}, 1 << 20, 2)
    weights.bring(3)
    weights.rewind()
    assert [call for call in calls if call[0] == "lay out"] == [("lay out", 3)] * 2
    assert [call for call in calls if call[0] == "await"] == [("await", 0), ("await", 1), ("await", 2)]
    weights.rewind()
    assert len([call for call in calls if call[0] == "await"]) == 3, (
        "at the begin of a round there is nothing left"
    )
    weights.bring(3)
    weights.bring(7)
    assert [part for name, part in calls if name == "await"] == [0, 1, 2, 0, 1, 2]
    weights.close()
    assert calls[-1] == ("end", 0)
