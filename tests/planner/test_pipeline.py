"""The whole pipeline on a tiny model file with made-up machine and engines."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from configs.errors import ModelFileError, PlanError, SettingsError, UserError
from configs.settings import Settings
from planner import pipeline
from planner.context import Context
from planner.progress import Reporter
from planner.workload import PlanRequest, make_workload, mix_for
from plans.key import verify_model
from plans.machine import Host, MachineReport
from plans.placement import Placement
from plans.plan import EngineBuild, Limits, RequestMix
from plans.store import PlanStore
from tests.planner.fakes import EngineFarm, card, encode, machine, machine_host, texts
from tests.tiny import write_model


class Bed:
    """A context around a farm of engines; counts probes."""

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder, "llama", "Q4_0", context_length_tokens=1024)
        self.farm = EngineFarm(self.speeds)
        self.n_probes = 0
        self.context = Context(
            settings=Settings(),
            store=PlanStore(folder / "plans"),
            read_host=machine_host,
            probe=self.probe,
            builds=lambda names, _: tuple(EngineBuild(name, "1", "aa" * 32) for name in names),
            factory=lambda path, settings: self.farm.factory,
            encoder=lambda path: encode,
            clock=self.farm.clock,
            version="0.0.1",
        )

    @staticmethod
    def speeds(placement: Placement) -> tuple[float, float]:
        return (100.0 * placement.prefill_threads, 20.0 * min(3, placement.decode_threads))

    def probe(self, here: Host, reprobe: bool, reporter: Reporter) -> MachineReport:
        self.n_probes += 1
        return machine()

    def plan(self, **changes: object) -> pipeline.Outcome:
        values: dict[str, object] = {"model_path": self.model, "budget_s": 200.0}
        return pipeline.make_plan(PlanRequest(**{**values, **changes}), self.context)  # type: ignore[arg-type]


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "load_texts", lambda source: texts())
    return Bed(tmp_path)


def test_a_model_becomes_a_saved_plan(bed: Bed) -> None:
    outcome = bed.plan()
    plan = outcome.plan
    assert plan is not None and not outcome.is_saved
    assert bed.context.store.load(plan.id) == plan
    assert plan.placement.prefill_threads == 4 and plan.placement.decode_threads >= 3
    assert plan.evidence.candidates[0].score_s is not None
    assert plan.evidence.trials and plan.rejected
    assert plan.key.model_files[0].path == str(bed.model)
    assert len(bed.farm.closed) == len(bed.farm.started)


def test_every_candidate_is_accounted_for_in_the_plan(bed: Bed) -> None:
    outcome = bed.plan()
    assert outcome.plan is not None and outcome.found is not None
    rejected = sum(row.count for row in outcome.plan.rejected)
    assert rejected + 1 == outcome.found.considered


def test_a_second_plan_comes_at_once_and_measures_nothing(bed: Bed) -> None:
    first = bed.plan().plan
    n_started, n_probes = len(bed.farm.started), bed.n_probes
    again = bed.plan(budget_s=500.0)
    assert again.is_saved and again.plan == first
    assert (len(bed.farm.started), bed.n_probes) == (n_started, n_probes)


def test_a_moved_model_keeps_its_plan_under_the_new_path(bed: Bed, tmp_path: Path) -> None:
    """Serving refuses the old path; planning again must not answer with it."""
    first = bed.plan().plan
    copy = tmp_path / "copy.gguf"
    shutil.copy(bed.model, copy)
    assert bed.plan(model_path=copy).plan == first  # the planned file is still there
    moved_to = tmp_path / "elsewhere.gguf"
    bed.model.rename(moved_to)
    n_requests = len(bed.farm.requests)
    outcome = bed.plan(model_path=moved_to)
    plan = outcome.plan
    assert (
        first is not None and plan is not None and outcome.is_saved and len(bed.farm.requests) == n_requests
    )
    assert plan.id != first.id and plan.evidence == first.evidence and plan.placement == first.placement
    assert plan.model.paths == (str(moved_to),) and verify_model(plan) == []
    assert bed.plan(model_path=moved_to).plan == plan == bed.context.store.load(plan.id)


def test_replan_makes_another_plan_and_keeps_the_first(bed: Bed) -> None:
    first, second = bed.plan().plan, bed.plan(replan=True).plan
    assert first is not None and second is not None and first.id != second.id
    assert {plan.id for plan in bed.context.store.list().plans} == {first.id, second.id}
    assert bed.plan().plan == second


@pytest.mark.parametrize(
    "changes", [{"concurrency": 2}, {"context_length_tokens": 512}, {"limits": Limits(threads=1)}]
)
def test_another_question_is_another_plan(bed: Bed, changes: dict[str, object]) -> None:
    first = bed.plan().plan
    other = bed.plan(**changes)
    assert first is not None and other.plan is not None
    assert not other.is_saved and other.plan.key.digest != first.key.digest


def test_a_dry_run_writes_nothing_and_starts_nothing(bed: Bed) -> None:
    outcome = bed.plan(dry_run=True)
    assert outcome.plan is None and outcome.found is not None and outcome.found.finalists
    assert bed.farm.started == [] and not bed.context.store.folder.exists()


def test_pins_are_in_the_plan(bed: Bed) -> None:
    plan = bed.plan(limits=Limits(threads=2, ubatch_tokens=128, load_mode="mmap")).plan
    assert plan is not None
    assert (plan.placement.decode_threads, plan.placement.prefill_threads) == (2, 2)
    assert (plan.placement.ubatch_tokens, plan.placement.load_mode) == (128, "mmap")
    assert plan.key.limits.threads == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_length_tokens": 2048}, "--ctx 2048 exceeds the 1024 tokens"),
        ({"context_length_tokens": 8}, "--ctx 8 is out of range; use 64 to 1024"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"kv_types": ("q3",)}, "--kv q3"),
        ({"limits": Limits(threads=64)}, "--threads 64"),
        ({"limits": Limits(host_memory_mib=1)}, "MiB short"),
    ],
)
def test_refusals_come_before_anything_is_measured(bed: Bed, changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        bed.plan(**changes)
    assert bed.n_probes == 0 and bed.farm.started == [] and not bed.context.store.folder.exists()


def test_a_file_that_is_no_model_is_refused(bed: Bed, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"<html>")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        bed.plan(model_path=broken)


def test_native_refuses_what_it_does_not_know_and_others_take_it() -> None:
    strange = card(native_reason="general.architecture = 'strange' is not supported")
    with pytest.raises(PlanError, match=r"strange.*try --engines llama-server"):
        pipeline.check_engines(strange, PlanRequest(Path("m")))
    both = PlanRequest(Path("m"), limits=Limits(engines=("native", "llama-server")))
    assert pipeline.check_engines(strange, both) == ("llama-server",)
    assert pipeline.check_engines(card(), both) == ("native", "llama-server")


def test_a_small_budget_affords_fewer_finalists(bed: Bed) -> None:
    few, many = bed.plan(dry_run=True, budget_s=1.0).found, bed.plan(dry_run=True, budget_s=500.0).found
    assert few is not None and many is not None
    assert 2 <= len(few.finalists) < len(many.finalists)


def test_workload_defaults() -> None:
    request = PlanRequest(Path("m"), default_context_length_tokens=4096)
    assert make_workload(card(), request).context_length_tokens == 4096
    small = msgspec.structs.replace(card(), context_length_tokens=1000)
    assert make_workload(small, request).context_length_tokens == 1000
    unknown = msgspec.structs.replace(card(), context_length_tokens=None)
    assert make_workload(unknown, request).context_length_tokens == 4096


def test_the_mix_fits_the_context() -> None:
    assert mix_for(4096) == RequestMix(512, 128)
    assert mix_for(640) == RequestMix(512, 128)
    assert mix_for(100) == RequestMix(80, 20)


def test_repetitive_prompts_are_refused_before_anything_is_measured(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "same.txt"
    file.write_text("7 " * 2000)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="repeat themselves"):
        bed.plan(prompts=str(file))
    assert bed.n_probes == 0 and bed.farm.started == []


def test_an_unknown_tokenizer_is_refused_before_the_file_is_hashed(bed: Bed) -> None:
    bed.model.write_bytes(bed.model.read_bytes().replace(b"gpt-2", b"gpt-x"))

    def forbidden(*_: object) -> NoReturn:
        raise AssertionError("hashed")

    bed.context = dataclasses.replace(bed.context, identify=forbidden)
    with pytest.raises(ModelFileError, match="gpt-x"):
        bed.plan()
    assert not bed.context.store.folder.exists()


def test_a_plan_folder_that_can_not_be_written_is_told_before_measuring(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bed.context = dataclasses.replace(bed.context, store=PlanStore(tmp_path / "file" / "plans"))
    with pytest.raises(SettingsError, match="XDG_DATA_HOME"):
        bed.plan()
    assert bed.n_probes == 0 and bed.farm.started == []


def test_a_plan_made_while_another_waited_is_its_answer(bed: Bed) -> None:
    @contextlib.contextmanager
    def turn(_: Reporter) -> Iterator[None]:
        if not inside:
            inside.append(True)
            first.append(bed.plan())
        yield

    inside: list[bool] = []
    first: list[pipeline.Outcome] = []
    bed.context = dataclasses.replace(bed.context, turn=turn)
    second = bed.plan()
    assert second.is_saved and second.plan == first[0].plan
    assert len(bed.context.store.list().plans) == 1
