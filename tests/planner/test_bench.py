"""A race of made-up engines: who is faster by how much, what is tuned, what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from configs.errors import MeasureError, UserError
from planner.bench import common, run
from planner.bench.cli import check_threads, fitting, race_text
from planner.bench.run import RaceTask
from planner.budget import Lengths
from planner.progress import Reporter
from plans.machine import ReadRate, best_read_bytes_per_s
from plans.placement import CPU_ONLY, GPU_ONLY, Assignment, Placement
from plans.plan import MemoryNeed, Plan
from tests.planner.fakes import EngineFarm, card, encode, placement, texts
from tests.plans.samples import TWO_BUILDS, sample_plan


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_card", lambda path: card())
    monkeypatch.setattr(run, "load_texts", lambda source: texts())


def speeds(item: Placement) -> tuple[float, float]:
    if item.engine == "native":
        return 1000.0, 60.0
    return 400.0, {4: 30.0, 2: 40.0}.get(item.decode_threads, 20.0)


def race(farm: EngineFarm, **changes: object) -> common.RaceResult:
    values: dict[str, object] = {
        "plan": sample_plan(),
        "baseline": "llama-server",
        "lengths": Lengths(128, 16),
        "rounds": 6,
    }
    task = RaceTask(**{**values, **changes})  # type: ignore[arg-type]
    return asyncio.run(run.race(task, farm.factory, encode, 64 << 30, Reporter(), farm.clock))


def test_the_ratio_and_its_interval() -> None:
    result = race(EngineFarm(speeds, noise=0.01))
    assert result.decode_speedup.ratio == pytest.approx(1.5, rel=0.03)
    assert result.prefill_speedup.ratio == pytest.approx(2.5, rel=0.03)
    low, high = result.decode_speedup.low, result.decode_speedup.high
    assert low is not None and high is not None and low < 1.5 < high
    assert result.decode_speedup.n == result.plan.rounds == 6


def test_the_baseline_is_tuned_first() -> None:
    result = race(EngineFarm(speeds))
    assert result.baseline.threads_decode == 2
    assert len(result.tuning) == 3


def test_a_hopeless_choice_of_threads_gets_one_trial() -> None:
    """All cores where other programs use them: a trial may take minutes."""

    def contended(item: Placement) -> tuple[float, float]:
        few = item.engine == "native" or item.prefill_threads <= 2
        return (1000.0, 50.0) if few else (10.0, 0.5)

    farm = EngineFarm(contended)
    result = race(farm)
    assert result.baseline.threads_decode == result.baseline.threads_prefill == 2
    assert len(result.tuning) == 3 and sum("given up" in words for words in result.tuning) == 2
    slow = [placement for placement in farm.started if contended(placement)[0] < 1000.0]
    assert len(slow) == 2 and farm.clock() - 100.0 < 2 * (128 / 10 + 16 / 0.5) * 1.1 + 30


def test_a_baseline_that_loses_by_more_prefill_threads_gets_fewer() -> None:
    """Cores that other programs keep busy: a team that is larger than what is free waits for itself."""

    def contended(item: Placement) -> tuple[float, float]:
        return 400.0 / item.prefill_threads, 30.0

    assert race(EngineFarm(contended)).baseline.threads_prefill == 2


def test_untuned_takes_all_cores() -> None:
    result = race(EngineFarm(speeds), tune=False)
    assert result.baseline.threads_decode == 4 and result.tuning == ()


def test_pinned_threads_hold_for_both_and_are_an_overlay() -> None:
    result = race(EngineFarm(speeds), threads=1)
    assert (result.plan.threads_decode, result.baseline.threads_decode) == (1, 1)
    assert "pinned to 1" in result.overlay[0]


def test_both_sides_get_the_same_ids_in_every_round() -> None:
    farm = EngineFarm(speeds)
    race(farm, threads=1)
    sides = [[ids for engine, ids in farm.requests if engine == name] for name in ("native", "llama-server")]
    assert sides[0] == sides[1]


def test_both_sides_take_turns_in_random_order() -> None:
    farm = EngineFarm(speeds)
    race(farm, threads=1, rounds=12)
    order = [engine for engine, _ in farm.requests[2:]]
    firsts = set(order[::2])
    assert firsts == {"native", "llama-server"}


@pytest.mark.parametrize("trouble", ["broken", "failing", "short"])
def test_a_side_that_fails_ends_the_race_with_its_words(trouble: str) -> None:
    farm = EngineFarm(speeds)
    getattr(farm, trouble).add("llama-server")
    with pytest.raises(MeasureError):
        race(farm)
    assert len(farm.closed) == len(farm.started)


def test_the_baseline_fills_the_room_that_layers_pass_through() -> None:
    split = (*CPU_ONLY, *(Assignment(f"layer.{layer}.*", "gpu0", "gpu0") for layer in (9, 10, 11)))
    plan = sample_plan()
    for passing_tokens, first in ((0, 9), (64, 8)):
        place = placement(assignments=split, passing_tokens=passing_tokens)
        split_plan = msgspec.structs.replace(plan, placement=place, gpu_memory=(MemoryNeed(0, 0, 0),))
        task = RaceTask(split_plan, "llama-server", Lengths(128, 16), 3)
        for theirs in run.baseline_placements(task):
            on_gpu = {item.units for item in theirs.assignments if item.device == "gpu0"}
            assert on_gpu == {f"layer.{layer}.*" for layer in range(first, 12)}
            assert theirs.passing_tokens == 0


def test_a_plan_on_the_baseline_itself_is_refused() -> None:
    plan = sample_plan(builds=TWO_BUILDS)
    same = placement(
        engine="llama-server", load_mode="mmap", huge_pages=False, decode_threads=4, prefill_threads=4
    )
    with pytest.raises(MeasureError, match="nothing to compare"):
        race(EngineFarm(speeds), plan=msgspec.structs.replace(plan, placement=same), tune=False)


def test_shares_of_the_memory_rate() -> None:
    result = race(EngineFarm(speeds, noise=0.0))
    assert result.plan.ram_bytes_per_s == 2.0e10
    moved = result.plan.decode_bytes_per_s
    assert moved is not None and result.plan.ram_share == pytest.approx(moved / 2.0e10)
    assert moved == pytest.approx(60.0 * card().file_bytes, rel=0.05)


def test_what_is_unknown_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_card", lambda path: card(native_reason="unknown"))
    plan: Plan = msgspec.structs.replace(sample_plan(), ram_read=())
    result = race(EngineFarm(speeds), plan=plan)
    assert result.plan.decode_bytes_per_s is None and result.plan.ram_share is None
    assert "n/a" in race_text(result)


def test_the_table_names_both_sides() -> None:
    text = race_text(race(EngineFarm(speeds)))
    assert "plan: native" in text and "baseline: llama-server" in text and "pairs" in text


def test_the_read_rate_is_the_best_up_to_the_threads() -> None:
    rates = [ReadRate(1, True, 10.0), ReadRate(2, False, 15.0), ReadRate(4, True, 30.0)]
    assert [best_read_bytes_per_s(rates, threads) for threads in (1, 3, 8)] == [10.0, 15.0, 30.0]
    assert best_read_bytes_per_s([], 4) is None


def test_lengths_must_fit_the_plan() -> None:
    assert fitting(100, 28, 128).prompt_tokens == 100
    with pytest.raises(UserError, match="129"):
        fitting(129, 1, 128)


def test_the_model_path_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(run, "read_card", lambda path: (seen.append(path), card())[1])
    race(EngineFarm(speeds))
    assert seen == [Path("/models/fake.gguf")]


def test_more_threads_than_cores_are_refused() -> None:
    check_threads(2, 2)
    with pytest.raises(UserError, match="--threads 99 .* 2 cores"):
        check_threads(99, 2)


MIB = 1 << 20


def gpu_plan(need_mib: int) -> Plan:
    """Every layer on a card of which 16 GiB may be taken."""
    on_gpu = placement(assignments=GPU_ONLY, gpu_memory_mib=(16_384,), ubatch_tokens=1024, decode_threads=1)
    need = MemoryNeed(need_mib * MIB, 0, 0)
    return msgspec.structs.replace(sample_plan(), placement=on_gpu, gpu_memory=(need,))


def test_on_a_gpu_the_size_of_a_step_is_tuned() -> None:
    def by_step(item: Placement) -> tuple[float, float]:
        return {512: 400.0, 1024: 2000.0, 2048: 900.0}[item.ubatch_tokens], 50.0

    result = race(EngineFarm(by_step), plan=gpu_plan(1_000))
    assert [words.split(": ")[0] for words in result.tuning] == [
        "llama-server gpu0 u512 f16",
        "llama-server gpu0 u2048 f16",
    ]
    assert result.prefill_speedup.ratio == pytest.approx(2000 / 900, rel=0.05)
    assert result.plan.ram_share is None and result.baseline.ram_share is None


@pytest.mark.parametrize(("need_mib", "fit_together"), [(8_000, True), (9_000, False)])
def test_sides_that_do_not_fit_on_the_gpu_together_take_turns(need_mib: int, fit_together: bool) -> None:
    farm = EngineFarm(speeds)
    race(farm, plan=gpu_plan(need_mib), tune=False, rounds=8)
    restarts = len(farm.started) - 2
    assert (restarts == 0) == fit_together
