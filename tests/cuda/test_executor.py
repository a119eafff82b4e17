"""The GPU executor on the host stand-in: lowering, inputs, graphs, upload and sections against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import EngineStartError, PlanError
from plans.placement import CPU_ONLY, GPU_ONLY, Assignment
from tests.cuda.executors import (
    GREEDY_WITH_TOP,
    SPLIT,
    decode,
    generate,
    load,
    placement,
    prefill_decode_and_mixed,
    prompt,
    read_silently,
    reference_logits,
    relative_error,
    synthetic_model,
)
from tests.cuda.host_device import HostDevice
from tests.cuda.numpy_kernels import NumpyKernels, numpy_kernels
from worker.cpu.library import built_library_path
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.batch import Batch
from worker.ops.lower import lower
from worker.ops.sections import cut, restrict
from worker.runtime.executor import CancelFlag, Output, SequencePart, StepBatch, StepCancelled
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.load_gpu import load_gpu

EXACT = 2e-3  # keys and values are rounded to f16
N_VOCAB = 1024
PAGES = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("models"), request.param)


def on_host(path: Path, device: HostDevice | None = None, **changes: Any) -> GpuExecutor:
    stand_in = device or HostDevice()
    place = placement(**changes)
    return load(path, place, make_device=lambda _: stand_in, make_kernels=numpy_kernels)


def needs_cpu_kernels() -> None:
    try:
        built_library_path()
    except EngineStartError as error:
        pytest.skip(str(error))


def test_prefill_decode_and_mixed_batches_match_the_reference(model: Path) -> None:
    executor = on_host(model)
    batches = prefill_decode_and_mixed(N_VOCAB, PAGES)
    for batch, expected in zip(batches, reference_logits(model, batches), strict=True):
        assert relative_error(executor.logits(batch), expected) < EXACT
    executor.close()


def test_chunks_of_a_prompt_want_no_answer(model: Path) -> None:
    executor, ids = on_host(model), prompt(40, N_VOCAB)
    batches = [Batch.of_sequence(ids[a:b], a, PAGES[0], all_outputs=False) for a, b in ((0, 30), (30, 40))]
    read_silently(executor, ids[:30], PAGES[0])
    assert relative_error(executor.logits(batches[1]), reference_logits(model, batches)[1]) < EXACT
    executor.close()


def test_a_decoded_token_is_one_graph_launch(model: Path) -> None:
    device = HostDevice()
    executor = on_host(model, device)
    generate(executor, [prompt(3, N_VOCAB)], 3, PAGES[:1])  # captures
    before, queued = device.graph_launches, len(device.log)
    generate(executor, [prompt(3, N_VOCAB)], 1, PAGES[:1])
    eager = len(device.log)
    generate(executor, [prompt(3, N_VOCAB)], 9, PAGES[:1])
    assert device.graph_launches - before == 8
    assert executor.counters.graph_launches == device.graph_launches
    assert len(device.log) - eager == eager - queued, "decode steps queue nothing but their graph"
    executor.close()


def test_padded_buckets_leave_other_pages_alone(model: Path) -> None:
    executor = on_host(model)
    prompts = [prompt(6, N_VOCAB, seed) for seed in range(3)]
    alone = [generate(executor, [ids], 5, [pages])[0] for ids, pages in zip(prompts, PAGES, strict=False)]
    together = generate(executor, prompts, 5, PAGES[:3])  # three in a bucket of four
    assert together == alone
    executor.close()


def test_warming_up_captures_decode_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path, device = synthetic_model(tmp_path, "tiny-dense"), HostDevice()
    executor = load_gpu(
        path,
        placement(max_sequences=2, ubatch_tokens=32),
        max_outputs=16,
        make_device=lambda _: device,
        make_kernels=numpy_kernels,
    )
    assert executor.counters.graphs_captured == 6  # one and two sequences greedy, one drawn; twice each
    before = executor.counters.graph_launches
    generated = generate(executor, [prompt(6, N_VOCAB)], 5, PAGES[:1])
    assert executor.counters.graph_launches - before == 4
    executor.close()
    cold = on_host(path)
    assert generate(cold, [prompt(6, N_VOCAB)], 5, PAGES[:1]) == generated
    cold.close()


def test_log_probabilities_and_targets(model: Path) -> None:
    executor = on_host(model)
    ids = prompt(6, N_VOCAB)
    batch = Batch.of_sequence(ids, 0, PAGES[0], all_outputs=True)
    logits = reference_logits(model, [batch])[0].astype(np.float64)
    logprobs = logits - logits.max(1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
    part = SequencePart(ids, 0, PAGES[0], (Output(2, target=5, top=3), Output(5, GREEDY_WITH_TOP)))
    asked, drawn = executor.run(StepBatch((part,), 6, 2), CancelFlag())
    assert asked.id == 5 and asked.logprob == pytest.approx(logprobs[2, 5], abs=1e-2)
    assert drawn.id == logits[5].argmax() and len(drawn.top) == 5
    assert decode(executor, [[7]], 6, PAGES[:1])[0].logprob is None
    executor.close()


def test_cancelling_ends_a_chunk(model: Path) -> None:
    executor = on_host(model)
    cancel = CancelFlag()
    cancel.set()
    part = SequencePart(prompt(20, N_VOCAB), 0, PAGES[0], (Output(19, GREEDY_WITH_TOP),))
    with pytest.raises(StepCancelled):
        executor.run(StepBatch((part,), 20, 1), cancel)
    executor.close()


def test_copied_pages_hold_the_same(model: Path) -> None:
    executor = on_host(model)
    ids = prompt(33, N_VOCAB)
    executor.logits(Batch.of_sequence(ids[:32], 0, PAGES[0], all_outputs=False))
    executor.copy_page(0, 6)
    first, second = (
        executor.logits(Batch.of_sequence(ids[32:], 32, pages, all_outputs=False))
        for pages in ([0, 1], [6, 7])
    )
    assert np.array_equal(first, second)
    executor.close()


@pytest.mark.parametrize(
    "assignments",
    [
        SPLIT,
        (*CPU_ONLY, Assignment("layer.*", "gpu0", "gpu0")),
        (*GPU_ONLY, Assignment("embedding", "ram", "cpu"), Assignment("layer.0.*", "ram", "cpu")),
        (*CPU_ONLY, Assignment("layer.3.*", "gpu0", "gpu0"), Assignment("head", "gpu0", "gpu0")),
    ],
)
def test_split_models_match_the_reference(model: Path, assignments: tuple[Assignment, ...]) -> None:
    needs_cpu_kernels()
    executor = on_host(model, assignments=assignments)
    ids = prompt(34, N_VOCAB)
    batch = Batch.of_sequence([*ids], 0, PAGES[0], all_outputs=False)
    logits = reference_logits(model, [batch])[0][0].astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    first = SequencePart(ids[:33], 0, PAGES[0], ())
    executor.run(StepBatch((first,), 33, 0), CancelFlag())
    for _ in range(2):  # op by op, then from graphs
        answer = decode(executor, [[ids[33]]], 33, PAGES[:1], GREEDY_WITH_TOP)[0]
    assert answer.logprob is not None
    assert answer.logprob == pytest.approx(expected[answer.id], abs=0.05 * logits.std())
    executor.close()


def test_memory_is_predicted_and_capped(model: Path) -> None:
    device = HostDevice()
    executor = on_host(model, device)
    need, taken = executor.models[0].need, executor.models[0].memory.taken
    assert (need.weights, need.kv, need.workspace) == (taken["weights"], taken["kv"], taken["workspace"])
    assert executor.memory_bytes()["gpu0"] == executor.models[0].memory.total_bytes
    executor.close()
    with pytest.raises(EngineStartError, match=r"gpu0 \(host stand-in\) would need [\d,]+ MiB.*650 MiB"):
        on_host(model, gpu_memory_mib=(650,))


def test_a_layer_split_in_itself_is_refused(model: Path) -> None:
    split = (*GPU_ONLY, Assignment("layer.1.ffn", "ram", "cpu"))
    with pytest.raises(PlanError, match="layer 1 is split between"):
        on_host(model, assignments=split)


def test_sections_renumber_what_they_use(model: Path) -> None:
    units = archs.units(open_model(model))
    oplist = lower(units)
    sections = cut(oplist, units, placement(SPLIT))
    assert [section.device for section in sections] == ["gpu0", "cpu", "gpu0"]
    middle = restrict(oplist, oplist.ops[sections[1].begin : sections[1].end])
    assert len(middle.kv_layers) == 2
    assert {weight.name.split(".")[1] for weight in middle.weights if weight.tensor} == {"1", "2"}
    assert max(index for op in middle.ops for index in op.weights) < len(middle.weights)


def test_the_order_of_kernels_is_that_of_the_ops(model: Path) -> None:
    """What a one-token step of a dense layer, or of a mixture, asks of the kernels, with shapes."""
    device = HostDevice()
    kernels: list[NumpyKernels] = []

    def make(on: HostDevice) -> NumpyKernels:
        kernels.append(NumpyKernels(on))
        return kernels[-1]

    executor = load(model, placement(max_sequences=1), make_device=lambda _: device, make_kernels=make)
    kernels[0].calls.clear()
    executor.logits(Batch.of_sequence([1], 0, PAGES[0], all_outputs=True))
    names = [call[0] for call in kernels[0].calls]
    per_step = len(names) // 2  # run, then captured
    ffn = ["router", "moe"] if "moe" in model.stem else ["linear", "glu", "linear"]
    layer = ["rms_norm", "linear", "rope_store", "attention", "linear", "rms_norm", *ffn]
    assert names[:per_step] == ["receive", "embed", *layer * 4, "select", "rms_norm", "linear"]
    calls = kernels[0].calls
    assert calls[3] == ("linear", 1, 256, (256, 128, 128), False)
    assert calls[5] == ("attention", 1, 1024, False, 0)
    executor.close()
