"""From a model file to a plan, one call a stage: inspect -> probe -> search -> measure -> select -> save.

Start reading here. Each stage takes and gives frozen values; what a stage decides is told in its own file.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from configs.errors import ModelFileError, PlanError
from configs.paths import usable_folder
from planner.budget import MOST_FINALISTS, affordable_finalists, trial_lengths
from planner.context import Context
from planner.gpu import cap_bytes
from planner.inspect import read_card
from planner.measure import Measurement, MeasureTask, measure
from planner.memory import host_limit_bytes
from planner.passages import Material
from planner.pool import EnginePool
from planner.probe import unmeasured
from planner.prompt_texts import PromptText, load_texts, texts_sha256
from planner.search import SearchResult, check_limits, search
from planner.select import Selection, select
from planner.workload import PlanRequest, make_workload
from plans.card import ModelCard
from plans.key import make_key, verify_model
from plans.machine import MachineReport
from plans.placement import NATIVE
from plans.plan import FORMAT_VERSION, Evidence, ModelIdentity, Plan, PlanKey, Workload


class Outcome(msgspec.Struct, frozen=True):
    """`plan` is None for a dry run; `is_saved`: it existed already. `found` is None where nothing was searched."""

    card: ModelCard
    plan: Plan | None
    is_saved: bool
    found: SearchResult | None


def make_plan(request: PlanRequest, context: Context) -> Outcome:
    """Raises UserError for requests that cannot be met, MeasureError when no candidate works."""
    context.reporter.stage(f"inspect {request.model_path}")
    card = read_card(request.model_path)
    engines = check_engines(card, request)
    texts = load_texts(request.prompts)
    workload = make_workload(card, request, texts_sha256(texts))
    refuse_early(card, workload, engines, request, context)
    if not request.dry_run:
        usable_folder(context.store.folder, "XDG_DATA_HOME")
    key = identify(card, workload, engines, request, context)
    saved = saved_answer(key, request, context)
    if saved is not None:
        return Outcome(card, saved, True, None)
    with contextlib.nullcontext() if request.dry_run else context.turn(context.reporter):
        saved = saved_answer(key, request, context)  # made while this one waited for its turn
        if saved is not None:
            return Outcome(card, saved, True, None)
        return search_and_measure(card, texts, key, engines, request, context)


def saved_answer(key: PlanKey, request: PlanRequest, context: Context) -> Plan | None:
    """The plan that answers the same question already, unless a new one is asked for.

    One whose model is no longer where it was is saved once more with the new place; what was measured holds.
    """
    saved = None if request.replan or request.dry_run else context.store.find_by_key(key.digest)
    if saved is None or saved.key.model_files == key.model_files or not verify_model(saved):
        return saved
    context.reporter.note(
        f"the model of plan {saved.id[:12]} was moved: its answer is saved for the new place"
    )
    paths = tuple(file.path for file in key.model_files)
    model = msgspec.structs.replace(saved.model, paths=paths)
    return context.store.save(msgspec.structs.replace(saved, created_at=now_text(), model=model, key=key))


def search_and_measure(
    card: ModelCard,
    texts: list[PromptText],
    key: PlanKey,
    engines: tuple[str, ...],
    request: PlanRequest,
    context: Context,
) -> Outcome:
    """Everything that takes minutes."""
    workload = key.workload
    material = Material(texts, context.encoder(Path(card.paths[0])))

    context.reporter.stage("probe this machine")
    report = context.probe(context.read_host(), request.reprobe, context.reporter)
    if NATIVE in engines and not report.gpus:
        context.reporter.note(f"no GPU is used: {gpu_absence(report)}")

    context.reporter.stage("search placements")
    found = find(card, report, workload, engines, request)
    context.reporter.note(f"{found.considered} considered, {len(found.finalists)} to be measured")
    if request.dry_run:
        return Outcome(card, None, False, found)

    context.reporter.stage(f"measure on {workload.prompts} prompts, at most about {request.budget_s:.0f} s")
    measurement = asyncio.run(race(card, report, workload, found, material, request, context))

    context.reporter.stage("select")
    selection = select(found.finalists, measurement, workload.mix, engines)
    context.reporter.note(f"{selection.winner.label}: {selection.because}")

    plan = build_plan(card, report, key, found, measurement, selection, request, context)
    return Outcome(card, context.store.save(plan), False, found)


def gpu_absence(report: MachineReport) -> str:
    """Why the search has no GPU to place anything on."""
    known = [reason.removeprefix("GPUs: ") for reason in report.missing if reason.startswith("GPUs: ")]
    return known[0] if known else report.host.gpus_absent_reason or "none was probed"


def check_engines(card: ModelCard, request: PlanRequest) -> tuple[str, ...]:
    """The engines to consider, in order of preference. Raises PlanError when native is asked for and cannot."""
    engines = request.limits.engines or (NATIVE,)
    if NATIVE not in engines or card.supported:
        return engines
    others = tuple(name for name in engines if name != NATIVE)
    if others:
        return others
    raise PlanError(
        f"{card.name} cannot run on the native engine: {card.native_reason}; try --engines llama-server"
    )


def refuse_early(
    card: ModelCard, workload: Workload, engines: tuple[str, ...], request: PlanRequest, context: Context
) -> None:
    """What cannot fit or be met is refused in a second, not after minutes of hashing and measuring."""
    if card.tokenizer_reason:
        raise ModelFileError(f"{card.name}: {card.tokenizer_reason}")
    context.builds(engines, context.settings)
    here = context.read_host()
    check_limits(here, request.limits)
    if not here.gpus:  # with some, what they hold is known after the probe
        search(card, unmeasured(here), workload, request.limits, engines, 1)


def identify(
    card: ModelCard, workload: Workload, engines: tuple[str, ...], request: PlanRequest, context: Context
) -> PlanKey:
    """What the plan will hold for. Hashing a large file for the first time takes a while."""
    builds = context.builds(engines, context.settings)
    files = context.identify(card.paths, context.reporter)
    return make_key(files, context.read_host().fingerprint, builds, workload, request.limits)


def find(
    card: ModelCard, report: MachineReport, workload: Workload, engines: tuple[str, ...], request: PlanRequest
) -> SearchResult:
    """The finalists: as many as the budget can repeat often enough to tell them apart."""
    widest = search(card, report, workload, request.limits, engines, MOST_FINALISTS)
    most = affordable_finalists(widest.finalists[0], card, report, workload, request)
    return search(card, report, workload, request.limits, engines, most)


async def race(
    card: ModelCard,
    report: MachineReport,
    workload: Workload,
    found: SearchResult,
    material: Material,
    request: PlanRequest,
    context: Context,
) -> Measurement:
    """Runs the finalists' engines; whatever happens they are stopped."""
    model_path = Path(card.paths[0])
    task = MeasureTask(
        candidates=found.finalists,
        mix=workload.mix,
        lengths=trial_lengths(card, report, workload, found, request.budget_s),
        concurrency=workload.concurrency,
        budget_s=request.budget_s,
        seed=request.seed,
        engines=check_engines(card, request),
    )
    gpu_limits = tuple(cap_bytes(gpu, request.limits) for gpu in report.gpus)
    pool = EnginePool(
        context.factory(model_path, context.settings), host_limit_bytes(report, request.limits), gpu_limits
    )
    try:
        return await measure(task, material, pool, context.reporter, context.clock)
    finally:
        await pool.close()


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def build_plan(
    card: ModelCard,
    report: MachineReport,
    key: PlanKey,
    found: SearchResult,
    measurement: Measurement,
    selection: Selection,
    request: PlanRequest,
    context: Context,
) -> Plan:
    return Plan(
        format_version=FORMAT_VERSION,
        placewright_version=context.version,
        created_at=now_text(),
        model=ModelIdentity(
            name=card.name,
            architecture=card.architecture,
            paths=card.paths,
            bytes=card.file_bytes,
            context_length_tokens=card.context_length_tokens,
        ),
        placement=selection.winner.placement,
        workload=key.workload,
        key=key,
        host=report.host,
        ram_read=report.ram_read,
        memory=selection.winner.memory,
        gpu_memory=selection.winner.gpu_memory,
        evidence=Evidence(
            budget_s=request.budget_s,
            spent_s=measurement.spent_s,
            decided=measurement.decided,
            chosen_because=selection.because,
            seed=request.seed,
            candidates=selection.results,
            trials=measurement.trials,
            undecided=selection.undecided,
        ),
        rejected=(*found.rejected, *measurement.rejected, *selection.rejected),
    )
