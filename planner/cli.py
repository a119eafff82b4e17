"""The planner's commands: inspect, probe, plan, plans, show, engines, doctor; `bench` is mounted from bench/cli.py.

Each command reads its flags, calls one function and prints. Results go to stdout, everything said to a person
to stderr; `--json` prints one document. Errors travel to `placewright.py` as exceptions.
"""

from __future__ import annotations

from typing import get_args

import typer

from configs.errors import PlacewrightError, UserError
from configs.paths import plans_folder
from configs.settings import Settings, load_settings
from configs.version import placewright_version
from planner import doctor, engines, flags, inspect, pipeline
from planner.bench.cli import bench_app
from planner.context import Context
from planner.output import emit, emit_json, say
from planner.probe import probe_machine
from planner.progress import make_reporter
from planner.search import SearchResult
from planner.workload import PlanRequest
from plans import host, show
from plans.placement import LoadMode
from plans.plan import Limits, plan_builtins
from plans.store import PlanStore


def split_list(flag: str, text: str | None) -> tuple[str, ...]:
    """The names of a list, each once; () where the flag was not given. Raises UserError for a list of nothing."""
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if text is not None and not names:
        raise UserError(f"{flag} {text!r} names nothing; leave the flag out or give a list like a,b")
    return names


def inspect_command(model: flags.Model, json: flags.Json = False) -> None:
    """Say what a model file is, where its bytes are, and whether the native engine runs it."""
    card = inspect.read_card(model)
    if json:
        emit_json(show.card_builtins(card))
    else:
        emit(show.card_text(card))


def probe_command(json: flags.Json = False, reprobe: flags.Reprobe = False) -> None:
    """Measure this machine: memory, kernels, disk. Kept until the machine or the kernels change."""
    with make_reporter() as reporter:
        reporter.stage("probe this machine")
        report = probe_machine(host.read_host(), reprobe, reporter)
    if json:
        emit_json(report)
    else:
        emit(show.report_text(report))


def plan_command(
    model: flags.Model,
    ctx: flags.Ctx = None,
    concurrency: flags.Concurrency = None,
    kv: flags.Kv = None,
    engine_names: flags.Engines = None,
    budget_s: flags.BudgetS = None,
    gpu_memory_mib: flags.GpuMemoryMib = None,
    host_memory_mib: flags.HostMemoryMib = None,
    allow_storage_streaming: flags.AllowStorageStreaming = False,
    prompts: flags.Prompts = None,
    threads: flags.Threads = None,
    ubatch: flags.Ubatch = None,
    load_mode: flags.LoadModeFlag = None,
    replan: flags.Replan = False,
    reprobe: flags.Reprobe = False,
    dry_run: flags.DryRun = False,
    json: flags.Json = False,
) -> None:
    """Search and measure how MODEL runs fastest here; save the answer as a plan."""
    settings = load_settings()
    limits = make_limits(
        settings,
        engine_names=split_list("--engines", engine_names),
        threads=threads,
        ubatch=ubatch,
        load_mode=load_mode,
        gpu_memory_mib=gpu_memory_mib,
        host_memory_mib=host_memory_mib,
        allow_storage_streaming=allow_storage_streaming,
    )
    request = PlanRequest(
        model_path=model,
        context_length_tokens=ctx,
        default_context_length_tokens=settings.plan.context_length_tokens,
        concurrency=concurrency if concurrency is not None else settings.plan.concurrency,
        kv_types=split_list("--kv", kv) or settings.plan.kv_types,
        limits=limits,
        budget_s=check_budget(budget_s if budget_s is not None else settings.plan.tuning_budget_s),
        prompts=prompts,
        replan=replan,
        reprobe=reprobe,
        dry_run=dry_run,
    )
    with make_reporter() as reporter:
        outcome = pipeline.make_plan(request, Context(settings=settings, reporter=reporter))
    print_outcome(outcome, json)


def make_limits(
    settings: Settings,
    *,
    engine_names: tuple[str, ...],
    threads: int | None,
    ubatch: int | None,
    load_mode: str | None,
    gpu_memory_mib: int | None,
    host_memory_mib: int | None,
    allow_storage_streaming: bool,
) -> Limits:
    for flag, value in (("--host-memory-mib", host_memory_mib), ("--gpu-memory-mib", gpu_memory_mib)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} is not a positive number of MiB")
    defaults = settings.plan
    return Limits(
        engines=engine_names or defaults.engines,
        threads=threads,
        ubatch_tokens=ubatch,
        load_mode=check_load_mode(load_mode),
        gpu_memory_mib=gpu_memory_mib if gpu_memory_mib is not None else defaults.gpu_memory_mib,
        host_memory_mib=host_memory_mib if host_memory_mib is not None else defaults.host_memory_mib,
        host_memory_margin_mib=defaults.host_memory_margin_mib,
        allow_storage_streaming=allow_storage_streaming or defaults.allow_storage_streaming,
    )


def check_load_mode(name: str | None) -> LoadMode | None:
    """Raises UserError for a name that is none."""
    modes: tuple[LoadMode, ...] = get_args(LoadMode)
    if name is not None and name not in modes:
        raise UserError(f"--load-mode {name} is not a load mode; there are {' and '.join(modes)}")
    return next((mode for mode in modes if mode == name), None)


def check_budget(seconds: float) -> float:
    """Raises UserError for a budget that is no time."""
    if not 0 < seconds < 1e6:
        raise UserError(f"--budget-s {seconds:g} is out of range; use a number of seconds above 0")
    return seconds


def print_outcome(outcome: pipeline.Outcome, json: bool) -> None:
    """The plan, or what a dry run would have measured."""
    plan = outcome.plan
    if plan is None:
        print_search(outcome.found, json)
        return
    if outcome.is_saved:
        say(
            f"a saved plan answers this ({plan.evidence.spent_s:.0f} s of measuring); --replan measures again"
        )
    if json:
        emit_json(plan_builtins(plan))
        if plan.evidence.undecided:
            say(show.undecided_text(plan))
    else:
        emit(show.plan_text(plan))
        say(f"\nserve it with: placewright serve {plan.id[:12]}")


def print_search(found: SearchResult | None, json: bool) -> None:
    assert found is not None
    if not json:
        emit("\n".join(f"would measure {item.label}" for item in found.finalists))
        say(show.CANDIDATE_KEY)
        return
    finalists = [
        {
            "candidate": item.label,
            "predicted_s": item.prediction.request_s if item.prediction else None,
            "memory": item.memory,
            "placement": item.placement,
        }
        for item in found.finalists
    ]
    emit_json(
        {"dry_run": True, "considered": found.considered, "finalists": finalists, "rejected": found.rejected}
    )


def plans_command(json: flags.Json = False) -> None:
    """List the saved plans, newest first."""
    listing = PlanStore(plans_folder()).list()
    if json:
        emit_json(show.listing_builtins(listing))
    else:
        emit(show.listing_text(listing))


def show_command(plan_id: flags.PlanId, json: flags.Json = False) -> None:
    """Show one plan: what it does, why it was chosen, what lost."""
    plan = PlanStore(plans_folder()).find(plan_id)
    if json:
        emit_json(plan_builtins(plan))
    else:
        emit(show.plan_text(plan))


def engines_command(json: flags.Json = False) -> None:
    """List the engines that can run plans here."""
    offers = engines.offers(load_settings())
    if json:
        emit_json(offers)
        return
    rows = [
        (offer.name, offer.kind, offer.version or "n/a", offer.location or "cannot be used")
        for offer in offers
    ]
    emit(show.table(("engine", "kind", "version", "where"), rows))
    for offer in offers:
        if offer.reason is not None:
            say(f"{offer.name}: {offer.reason}; {offer.remedy}")


def doctor_command(json: flags.Json = False) -> None:
    """Check what Placewright needs here, with a remedy for everything that is missing."""
    checks = doctor.run_checks()
    if json:
        emit_json(checks)
    else:
        emit("\n".join(doctor.check_text(check) for check in checks))
    failed = [check.name for check in checks if check.state == "failed"]
    if failed:
        raise PlacewrightError(f"doctor found problems with: {', '.join(failed)}")


def about(version: flags.Version = False) -> None:
    """Measures how a GGUF model runs fastest on this machine, saves that as a plan, and serves it."""
    if version:
        emit(f"placewright {placewright_version()}")


def mount(app: typer.Typer) -> None:
    """Adds the planner's commands to the command line."""
    app.callback(invoke_without_command=True)(about)
    app.command("inspect")(inspect_command)
    app.command("probe")(probe_command)
    app.command("plan")(plan_command)
    app.command("plans")(plans_command)
    app.command("show")(show_command)
    app.command("engines")(engines_command)
    app.command("doctor")(doctor_command)
    app.add_typer(bench_app, name="bench")
