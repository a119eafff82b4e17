"""Placements on GPUs: what fits where, what a cap does, what is predicted; without any GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from planner.budget import engine_start_s, fills_a_gpu
from planner.doctor import _gpus
from planner.gpu import cap_bytes, fill, gpu_candidates, predict_gpu
from planner.gpu_memory import DeviceUse, StepSizes, device_need
from planner.inspect import read_card
from planner.memory import kv_bytes
from planner.pool import EnginePool
from planner.search import search
from plans import show
from plans.machine import Gpu
from plans.placement import CPU_ONLY, GPU_ONLY, Assignment
from plans.plan import Limits, MemoryNeed, RequestMix, Workload
from tests.cuda.emulated_model import ShapesOnlyLauncher
from tests.cuda.executors import placement as tiny_placement
from tests.cuda.executors import synthetic_model
from tests.cuda.host_device import HostDevice
from tests.planner.fakes import EngineFarm, card, gpu, gpu_machine, machine, placement
from tests.plans.samples import sample_plan
from worker.cuda.cuda_kernels import CudaKernels
from worker.cuda.model import predict
from worker.cuda.passing import NOTHING, Passing
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.lower import lower
from worker.ops.oplist import OpKind
from worker.ops.sections import restrict
from worker.runtime.load import page_bytes, page_count
from worker.runtime.load_gpu import step_limits

MIB = 1 << 20


def workload(context: int = 4096, concurrency: int = 1) -> Workload:
    return Workload(context, concurrency, ("f16",), RequestMix(512, 128))


def test_a_model_that_fits_goes_to_the_gpu_whole() -> None:
    found = search(card(), gpu_machine(gpu()), workload(), Limits(), ("native",))
    best = found.finalists[0]
    assert best.placement.assignments == GPU_ONLY
    assert best.label.startswith("native gpu0 u")
    assert best.gpu_memory[0].total_bytes <= 16_384 * MIB
    assert best.placement.gpu_memory_mib == (16_384 - 512,)
    assert best.memory.weights_bytes == 0, "nothing stays in RAM"
    assert found.considered == len(found.finalists) + sum(row.count for row in found.rejected)


def test_a_cap_splits_by_layer_and_is_kept() -> None:
    cap_mib = 880
    limits = Limits(gpu_memory_mib=cap_mib)
    found = search(card(), gpu_machine(gpu()), workload(), limits, ("native",))
    split = next(item for item in found.finalists if item.placement.gpu_ordinals)
    placement = split.placement
    on_gpu = [item.units for item in placement.assignments if item.device == "gpu0"]
    assert on_gpu[-1] == "head" and "embedding" not in on_gpu
    assert 0 < len(on_gpu) - 1 < 16
    assert f"gpu0 {len(on_gpu) - 1} layers + cpu" in split.label
    assert split.gpu_memory[0].total_bytes <= cap_mib * MIB
    assert placement.gpu_memory_mib == (cap_mib,)
    assert split.memory.weights_bytes > 0 and split.memory.kv_bytes > 0
    first = int(on_gpu[0].split(".")[1])
    larger = DeviceUse(0, first - 1, 16, False, True, first - 1 if placement.passing_tokens else 0)
    need = device_need(card(), larger, StepSizes("f16", 4096, 1, 1, placement.ubatch_tokens))
    assert need.total_bytes > cap_mib * MIB, "one layer more would not have fitted"


def test_more_layers_are_predicted_faster() -> None:
    def predicted(cap_mib: int) -> float:
        limits = Limits(gpu_memory_mib=cap_mib, threads=3)
        found = search(card(), gpu_machine(gpu()), workload(), limits, ("native",), 8)
        seconds = [
            item.prediction.request_s
            for item in found.finalists
            if item.placement.gpu_ordinals and item.prediction
        ]
        return min(seconds)

    assert predicted(2_000) < predicted(900) < predicted(880)


def test_a_cap_that_holds_nothing_leaves_the_cpu() -> None:
    found = search(card(), gpu_machine(gpu()), workload(), Limits(gpu_memory_mib=300), ("native",))
    assert not any(item.placement.gpu_ordinals for item in found.finalists)


def test_no_gpu_report_no_gpu_candidates() -> None:
    assert not list(gpu_candidates(card(), machine(), workload(), Limits(), "native"))


def test_llama_server_is_a_candidate_there_too() -> None:
    found = search(card(), gpu_machine(gpu()), workload(), Limits(), ("native", "llama-server"), 8)
    theirs = [item for item in found.finalists if item.placement.engine == "llama-server"]
    assert any(item.placement.gpu_ordinals == (0,) and item.prediction is None for item in theirs)


def test_two_gpus_share_what_one_can_not_hold() -> None:
    caps = [(0, 880 * MIB), (1, 1000 * MIB)]
    first, second = fill(card(), caps, StepSizes("f16", 4096, 1, 1, 512))
    assert (first.ordinal, second.ordinal) == (1, 0)
    assert second.end == 16 and first.end == second.first and second.has_head and not first.has_head


def test_a_model_over_two_gpus_leaves_nothing_to_the_cpu() -> None:
    both = gpu_machine(gpu(), gpu(ordinal=1))
    found = search(card(), both, workload(), Limits(gpu_memory_mib=900), ("native",))
    best = found.finalists[0]
    assert best.label.startswith("native gpu0 gpu1 u") and best.memory.weights_bytes == 0
    devices = {item.units: item.device for item in best.placement.assignments}
    assert devices["*"] == "gpu1" and devices["layer.15.*"] == devices["head"] == "gpu0"
    head, rest = best.gpu_memory
    assert head.workspace_bytes > rest.workspace_bytes, "by number: logits are on the first"
    assert all(need.total_bytes <= 900 * MIB for need in best.gpu_memory)


def test_engines_that_fill_their_gpu_start_again_for_each_trial() -> None:
    machine_of = gpu_machine(gpu())
    whole = search(card(), machine_of, workload(), Limits(), ("native",)).finalists[0]
    assert not fills_a_gpu(whole, machine_of, Limits())
    capped = Limits(gpu_memory_mib=880)
    split = search(card(), machine_of, workload(), capped, ("native",)).finalists[0]
    assert fills_a_gpu(split, machine_of, capped)


def test_the_cap_is_what_is_free_less_a_margin_or_the_flag() -> None:
    assert cap_bytes(gpu(free_mib=10_000), Limits()) == (10_000 - 512) * MIB
    assert cap_bytes(gpu(free_mib=10_000), Limits(gpu_memory_mib=4_000)) == 4_000 * MIB
    assert cap_bytes(gpu(free_mib=2_000), Limits(gpu_memory_mib=4_000)) == (2_000 - 512) * MIB


@pytest.mark.parametrize("shape", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize(("ubatch", "sequences"), [(512, 1), (2048, 4), (4096, 20)])
def test_the_planner_predicts_what_the_worker_takes(
    tmp_path: Path, shape: str, ubatch: int, sequences: int
) -> None:
    """Never less than the worker's own prediction, which it compares with what it took, and not much more."""
    path = synthetic_model(tmp_path, shape)
    place = tiny_placement(
        context_length_tokens=2048, max_sequences=sequences, ubatch_tokens=ubatch, kv_budget_bytes=1 << 40
    )
    oplist = lower(archs.units(open_model(path)))
    kernels = CudaKernels(HostDevice(), ShapesOnlyLauncher(), make_blas=lambda _: object())  # type: ignore
    n_pages = page_count(place, page_bytes(oplist, "f16"))
    exact = predict(oplist, kernels, step_limits(place, max(sequences, 16)), "f16", n_pages)
    whole = DeviceUse(0, 0, 4, True, True)
    planned = device_need(read_card(path), whole, StepSizes("f16", 2048, sequences, sequences + 1, ubatch))
    assert planned.weights_bytes >= exact.weights
    assert planned.kv_bytes >= exact.kv
    assert planned.total_bytes >= exact.total
    assert planned.total_bytes < 1.3 * exact.total + 64 * MIB


@pytest.mark.parametrize("shape", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("n_passing", [0, 2])
@pytest.mark.parametrize("ubatch", [128, 512])
def test_the_planner_predicts_what_the_worker_takes_of_a_part(
    tmp_path: Path, shape: str, n_passing: int, ubatch: int
) -> None:
    """Tighter than above, for a capped card is to be filled to the last layer: rounding, and so small a cache's raw
    buffers."""
    path = synthetic_model(tmp_path, shape)
    card, sizes = read_card(path), StepSizes("f16", 2048, 1, 1, ubatch)
    use = DeviceUse(0, 2, 4, False, True, n_passing)
    budget = kv_bytes(card, "f16", 2048, 1)
    place = tiny_placement(
        context_length_tokens=2048, max_sequences=1, ubatch_tokens=ubatch, kv_budget_bytes=budget
    )
    oplist = lower(archs.units(open_model(path)))
    own = tuple(
        op for op in oplist.ops if n_passing or op.layer >= 2 or (op.layer < 0 and op.kind != OpKind.EMBED)
    )
    kernels = CudaKernels(HostDevice(), ShapesOnlyLauncher(), make_blas=lambda _: object())  # type: ignore
    n_pages = page_count(place, page_bytes(oplist, "f16"))
    passing = Passing((0, 1), ubatch) if n_passing else NOTHING
    exact = predict(restrict(oplist, own), kernels, step_limits(place, 16), "f16", n_pages, None, passing)
    planned = device_need(card, use, sizes)
    assert planned.weights_bytes >= exact.weights
    assert planned.kv_bytes >= exact.kv
    assert exact.total <= planned.total_bytes < exact.total + 16 * MIB


def test_a_smaller_step_is_offered_where_it_frees_a_layer() -> None:
    """And only there: a larger one with as many layers is as good for any prompt."""
    limits = Limits(gpu_memory_mib=880)
    found = [item for item in gpu_candidates(card(), gpu_machine(gpu()), workload(), limits, "native")]
    for passes in (False, True):
        places = [item for item in found if (item.placement.passing_tokens > 0) == passes]
        layers = {item.placement.ubatch_tokens: item.n_gpu_layers for item in places}
        assert max(layers) == 512 and len(layers) > 1
        assert sorted(layers, reverse=True) == sorted(layers, key=lambda size: layers[size])
        assert len(set(layers.values())) == len(layers)
    assert all(item.needs[0].total_bytes <= 880 * MIB for item in found)


def test_layers_may_pass_through_a_gpu_where_the_link_is_known() -> None:
    machine_of = gpu_machine(gpu())
    mix, limits = workload().mix, Limits(gpu_memory_mib=900, ubatch_tokens=512)
    found = list(gpu_candidates(card(), machine_of, workload(), limits, "native"))
    passing = next(item for item in found if item.placement.passing_tokens)
    staying = next(item for item in found if not item.placement.passing_tokens)
    assert 64 <= passing.placement.passing_tokens <= 512
    assert passing.n_gpu_layers < staying.n_gpu_layers, "the place that layers pass through takes room"
    one, other = (predict_gpu(card(), item, machine_of, mix) for item in (passing, staying))
    assert one is not None and other is not None
    assert one.prefill_s < other.prefill_s and one.decode_token_s > other.decode_token_s
    no_link = gpu_machine(msgspec.structs.replace(gpu(), copies=()))
    blind = gpu_candidates(card(), no_link, workload(), limits, "native")
    assert not any(item.placement.passing_tokens for item in blind)
    left_bytes = staying.host_need.total_bytes + 50 * MIB
    small = gpu_machine(gpu(), available_bytes=left_bytes + (Limits().host_memory_margin_mib << 20))
    in_ram = gpu_candidates(card(), small, workload(), limits, "native")
    assert not any(item.placement.passing_tokens for item in in_ram), (
        "the file would not stay in the page cache"
    )


def test_a_split_model_keeps_cache_for_its_sequences_alone() -> None:
    limits = Limits(gpu_memory_mib=880)
    for item in gpu_candidates(card(), gpu_machine(gpu()), workload(), limits, "native"):
        assert item.placement.kv_budget_bytes == kv_bytes(card(), "f16", 4096, 1)
    whole = next(gpu_candidates(card(), gpu_machine(gpu()), workload(), Limits(), "native"))
    assert whole.placement.kv_budget_bytes == kv_bytes(card(), "f16", 4096, 2)


def test_engines_that_do_not_fit_together_take_turns() -> None:
    farm = EngineFarm(lambda _: (100.0, 10.0))
    found = search(card(), gpu_machine(gpu(free_mib=2_200)), workload(), Limits(), ("native",), 8)
    on_gpu = [item for item in found.finalists if item.placement.gpu_ordinals]
    need = on_gpu[0].gpu_memory[0].total_bytes
    other = msgspec.structs.replace(on_gpu[0], label="another")

    async def run(limit: int) -> int:
        pool = EnginePool(farm.factory, 64 << 30, (limit,))
        await pool.get(on_gpu[0])
        await pool.get(other)
        running = len(pool._running)
        await pool.close()
        return running

    assert asyncio.run(run(2 * need)) == 2
    assert asyncio.run(run(2 * need - 1)) == 1


def test_reports_show_their_gpus() -> None:
    text = show.report_text(gpu_machine(gpu()))
    assert "gpu0  Fake GPU, driver 999.1" in text and "600.0 GB/s" in text


def test_a_plan_says_where_its_layers_are() -> None:
    def lines(*assignments: Assignment, passing_tokens: int = 0) -> list[str]:
        place = placement(assignments=assignments, passing_tokens=passing_tokens)
        needs = (MemoryNeed(1, 1, 1),) * len(place.gpu_ordinals)
        plan = msgspec.structs.replace(sample_plan(), placement=place, gpu_memory=needs)
        return [line for line in show.plan_text(plan).splitlines() if line.startswith("  layers")]

    on_gpu = tuple(Assignment(f"layer.{layer}.*", "gpu0", "gpu0") for layer in (2, 3))
    assert lines(*CPU_ONLY) == []
    assert lines(*CPU_ONLY, *on_gpu) == ["  layers     2 on gpu0, the others on cpu"]
    (passing,) = lines(*CPU_ONLY, *on_gpu, passing_tokens=64)
    assert passing.endswith("on cpu, passing through a GPU in steps of 64 tokens or more")
    assert lines(Assignment("*", "gpu1", "gpu1"), *on_gpu) == ["  layers     2 on gpu0, the others on gpu1"]


def test_doctor_says_what_a_gpu_lacks() -> None:
    cards = (Gpu("Fake GPU", "999.1"),)
    assert _gpus(cards, None, True).state == "ok"
    lacking = _gpus(cards, None, False)
    assert lacking.state == "note" and "cuda13" in (lacking.remedy or "")
    assert _gpus((), "no NVIDIA driver", False).found == "none: no NVIDIA driver"


def test_a_gpu_is_filled_faster_than_ram() -> None:
    """So that a short budget measures as many candidates on it, and as long."""
    large = msgspec.structs.replace(card(), file_bytes=18 << 30)
    found = search(card(), gpu_machine(gpu()), workload(), Limits(), ("native",), 8)
    on_gpu = next(item.placement for item in found.finalists if item.placement.gpu_ordinals)
    assert engine_start_s(large, on_gpu) < 5 < 15 < engine_start_s(large, placement())
