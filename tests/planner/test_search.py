"""Search and pruning: what is considered, what is dropped and why, and what pins do."""

from __future__ import annotations

import pytest

from configs.errors import PlanError
from planner.search import Candidate, SearchResult, pick_finalists, search, thread_ladder
from plans.placement import KvType
from plans.plan import Limits, RequestMix, Workload
from tests.planner.fakes import card, machine


def workload(context: int = 4096, kv_types: tuple[KvType, ...] = ("f16",), concurrency: int = 1) -> Workload:
    return Workload(context, concurrency, kv_types, RequestMix(512, 128))


def found(limits: Limits | None = None, most: int = 6, **changes: object) -> SearchResult:
    values: dict[str, object] = {"report": machine(), "workload": workload(), "engines": ("native",)}
    values.update(changes)
    return search(card(), limits=limits or Limits(), most_finalists=most, **values)  # type: ignore[arg-type]


def accounted(result: SearchResult) -> int:
    return len(result.finalists) + sum(row.count for row in result.rejected)


@pytest.mark.parametrize(
    ("cores", "ladder"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4)), (16, (1, 2, 3, 4, 5, 6, 8, 10, 13, 16))]
)
def test_thread_ladder(cores: int, ladder: tuple[int, ...]) -> None:
    assert thread_ladder(cores) == ladder


def test_every_candidate_is_a_finalist_or_has_a_reason() -> None:
    result = found()
    assert accounted(result) == result.considered
    assert all(row.reason for row in result.rejected)


def test_it_is_deterministic() -> None:
    assert found() == found()


def test_decode_takes_the_fewest_threads_that_saturate_memory() -> None:
    """The fake machine's memory is saturated by three of four threads, its arithmetic by none."""
    best = found().finalists[0].placement
    assert best.decode_threads == 3
    assert best.prefill_threads == 4
    assert best.load_mode == "packed" and best.huge_pages


def test_slower_predictions_are_dropped_with_numbers() -> None:
    reasons = [row.reason for row in found().rejected if row.stage == "cost"]
    assert any("times the best" in reason for reason in reasons)
    assert any("takes less" in reason for reason in reasons)


def test_finalists_are_ordered_by_prediction_and_limited() -> None:
    finalists = found(most=3).finalists
    seconds = [item.prediction.request_s for item in finalists if item.prediction]
    assert len(finalists) <= 3 and seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("limits", "field", "value"),
    [
        (Limits(threads=1), "decode_threads", 1),
        (Limits(threads=2), "prefill_threads", 2),
        (Limits(ubatch_tokens=96), "ubatch_tokens", 96),
        (Limits(load_mode="mmap"), "load_mode", "mmap"),
    ],
)
def test_pins_constrain_and_do_not_switch_off(limits: Limits, field: str, value: object) -> None:
    result = found(limits)
    assert {getattr(item.placement, field) for item in result.finalists} == {value}
    assert result.considered > 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(threads=9), "--threads 9 cannot be met: this process may use 4 cores"),
        (Limits(threads=0), "--threads 0"),
        (Limits(ubatch_tokens=0), "--ubatch 0"),
        (Limits(gpu_memory_mib=8000), "no NVIDIA driver"),
    ],
)
def test_pins_that_nothing_satisfies_are_refused_by_name(limits: Limits, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        found(limits)


def test_kv_types_are_searched_only_when_allowed() -> None:
    assert {item.placement.kv_type for item in found().finalists} == {"f16"}
    both = found(workload=workload(kv_types=("f16", "q8_0")))
    assert {item.placement.kv_type for item in both.finalists} == {"f16", "q8_0"}


def test_each_engine_sends_a_finalist() -> None:
    result = found(engines=("native", "llama-server"), most=2)
    assert {item.placement.engine for item in result.finalists} == {"native", "llama-server"}
    assert accounted(result) == result.considered


def test_an_engine_without_predictions_is_tried_with_all_cores() -> None:
    result = found(engines=("llama-server",))
    assert result.finalists[0].prediction is None
    assert result.finalists[0].placement.decode_threads == 4


def test_an_unmeasured_machine_prunes_nothing_by_cost_prediction() -> None:
    result = found(report=machine(measured=False), most=100)
    assert not any("predicted" in row.reason for row in result.rejected)
    assert accounted(result) == result.considered


def test_no_room_is_refused_with_the_number_that_is_short() -> None:
    with pytest.raises(PlanError, match=r"does not fit.* MiB short; try a smaller --ctx"):
        found(report=machine(available_bytes=1200 << 20))


def test_host_cap_counts() -> None:
    with pytest.raises(PlanError, match=r"a larger --host-memory-mib \(now 100\)"):
        found(Limits(host_memory_mib=100))


def test_streaming_leaves_only_mapped_weights() -> None:
    limits = Limits(host_memory_mib=310, allow_storage_streaming=True)
    result = found(limits)
    assert {item.placement.load_mode for item in result.finalists} == {"mmap"}
    assert any(row.stage == "memory" for row in result.rejected)


def test_steps_larger_than_the_mix_are_not_measured() -> None:
    assert max(item.placement.ubatch_tokens for item in found(most=50).finalists) <= 512


def test_pick_finalists_keeps_the_rest() -> None:
    finalists: list[Candidate] = list(found(most=50).finalists)
    chosen, others = pick_finalists(finalists, 2)
    assert len(chosen) == 2 and len(chosen) + len(others) == len(finalists)
