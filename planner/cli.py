"""The planner's commands: inspect, probe, plan, plans, show, engines, doctor; `bench` is mounted from
bench/cli.py.

Each command reads its flags, calls one function and prints. Results go to stdout, everything said to a person
to stderr; `--json` prints one document. Errors travel to `placewright.py` as exceptions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import typer

from configs.errors import PlacewrightError, UserError
from configs.paths import plans_folder
from configs.settings import Settings, load_settings
from planner import doctor, engines, inspect, pipeline
from planner.bench.cli import bench_app
from planner.context import Context
from planner.probe import probe_machine
from planner.progress import make_reporter
from planner.workload import PlanRequest
from plans import host, show
from plans.plan import Limits, plan_builtins
from plans.store import PlanStore

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[Path, typer.Argument(help="A GGUF file, or any part of a split set.", metavar="MODEL")]
PlanId = Annotated[str, typer.Argument(help="A plan's id or any unique beginning of it.", metavar="PLAN_ID")]


def emit(text: str) -> None:
    """A result on stdout."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def emit_json(value: Any) -> None:
    emit(msgspec.json.format(msgspec.json.encode(value)).decode())


def say(text: str) -> None:
    """A word to the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def split_list(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def inspect_command(model: Model, json: Json = False) -> None:
    """Say what a model file is, where its bytes are, and whether the native engine runs it."""
    card = inspect.read_card(model)
    if json:
        emit_json(show.card_builtins(card))
    else:
        emit(show.card_text(card))


def probe_command(
    json: Json = False,
    reprobe: Annotated[bool, typer.Option("--reprobe", help="Measure again, whatever is known.")] = False,
) -> None:
    """Measure this machine: memory, kernels, disk. Kept until the machine or the kernels change."""
    with make_reporter() as reporter:
        reporter.stage("probe this machine")
        report = probe_machine(host.read_host(), reprobe, reporter)
    if json:
        emit_json(report)
    else:
        emit(show.report_text(report))


def plan_command(
    model: Model,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", help="Context of one sequence, in tokens. Default: the setting, at most the model's."
        ),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sequences that run at a time.")] = None,
    kv: Annotated[
        str | None, typer.Option("--kv", help="KV cache type, f16 or q8_0; a list lets the search choose.")
    ] = None,
    engine_names: Annotated[
        str | None,
        typer.Option("--engines", help="Engines to consider, by preference: native,llama-server,..."),
    ] = None,
    budget_s: Annotated[float | None, typer.Option("--budget-s", help="Seconds to measure for.")] = None,
    gpu_memory_mib: Annotated[
        int | None, typer.Option("--gpu-memory-mib", help="Cap on memory of a GPU.")
    ] = None,
    host_memory_mib: Annotated[int | None, typer.Option("--host-memory-mib", help="Cap on RAM.")] = None,
    allow_storage_streaming: Annotated[
        bool,
        typer.Option("--allow-storage-streaming", help="Weights may be read from storage again and again."),
    ] = False,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", help="Measure on a text or .jsonl file, or on hf:NAME (a data set)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Pin: threads of decode and prefill.")
    ] = None,
    ubatch: Annotated[int | None, typer.Option("--ubatch", help="Pin: most tokens of a step.")] = None,
    load_mode: Annotated[
        str | None,
        typer.Option("--load-mode", help="Pin: mmap (as in the file) or packed (copied for the kernels)."),
    ] = None,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again; makes another plan.")] = False,
    reprobe: Annotated[bool, typer.Option("--reprobe", help="Measure the machine again first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured; write no plan.")
    ] = False,
    json: Json = False,
) -> None:
    """Search and measure how MODEL runs fastest here; save the answer as a plan."""
    settings = load_settings()
    request = make_request(
        settings,
        model,
        ctx=ctx,
        concurrency=concurrency,
        kv=split_list(kv),
        budget_s=budget_s,
        prompts=prompts,
        flags=(replan, reprobe, dry_run),
        limits=make_limits(
            settings,
            engine_names=split_list(engine_names),
            threads=threads,
            ubatch=ubatch,
            load_mode=load_mode,
            gpu_memory_mib=gpu_memory_mib,
            host_memory_mib=host_memory_mib,
            allow_storage_streaming=allow_storage_streaming,
        ),
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
    if load_mode not in (None, "mmap", "packed"):
        raise UserError(f"--load-mode {load_mode} is not a load mode; there are mmap and packed")
    for flag, value in (("--host-memory-mib", host_memory_mib), ("--gpu-memory-mib", gpu_memory_mib)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} is not a positive number of MiB")
    defaults = settings.plan
    return Limits(
        engines=engine_names or defaults.engines,
        threads=threads,
        ubatch_tokens=ubatch,
        load_mode=cast(Literal["mmap", "packed"] | None, load_mode),
        gpu_memory_mib=gpu_memory_mib if gpu_memory_mib is not None else defaults.gpu_memory_mib,
        host_memory_mib=host_memory_mib if host_memory_mib is not None else defaults.host_memory_mib,
        host_memory_margin_mib=defaults.host_memory_margin_mib,
        allow_storage_streaming=allow_storage_streaming or defaults.allow_storage_streaming,
    )


def make_request(
    settings: Settings,
    model: Path,
    *,
    ctx: int | None,
    concurrency: int | None,
    kv: tuple[str, ...],
    budget_s: float | None,
    prompts: str | None,
    flags: tuple[bool, bool, bool],
    limits: Limits,
) -> PlanRequest:
    defaults = settings.plan
    budget = budget_s if budget_s is not None else defaults.tuning_budget_s
    if not 0 < budget < 1e6:
        raise UserError(f"--budget-s {budget:g} is out of range; use a number of seconds above 0")
    return PlanRequest(
        model_path=model,
        context_length_tokens=ctx,
        default_context_length_tokens=defaults.context_length_tokens,
        concurrency=concurrency if concurrency is not None else defaults.concurrency,
        kv_types=kv or defaults.kv_types,
        limits=limits,
        budget_s=budget,
        prompts=prompts,
        replan=flags[0],
        reprobe=flags[1],
        dry_run=flags[2],
    )


def print_outcome(outcome: pipeline.Outcome, json: bool) -> None:
    plan, found = outcome.plan, outcome.found
    if plan is None:
        assert found is not None
        finalists = [
            {
                "candidate": item.label,
                "predicted_s": item.prediction.request_s if item.prediction else None,
                "memory": item.memory,
                "placement": item.placement,
            }
            for item in found.finalists
        ]
        dry = {
            "dry_run": True,
            "considered": found.considered,
            "finalists": finalists,
            "rejected": found.rejected,
        }
        if json:
            emit_json(dry)
        else:
            emit("\n".join(f"would measure {item.label}" for item in found.finalists))
        return
    if outcome.is_saved:
        say(
            f"a saved plan answers this ({plan.evidence.spent_s:.0f} s of measuring); --replan measures again"
        )
    if json:
        emit_json(plan_builtins(plan))
    else:
        emit(show.plan_text(plan))
        say(f"\nserve it with: placewright serve {plan.id[:12]}")


def plans_command(json: Json = False) -> None:
    """List the saved plans, newest first."""
    listing = PlanStore(plans_folder()).list()
    if json:
        emit_json(show.listing_builtins(listing))
    else:
        emit(show.listing_text(listing))


def show_command(plan_id: PlanId, json: Json = False) -> None:
    """Show one plan: what it does, why it was chosen, what lost."""
    plan = PlanStore(plans_folder()).find(plan_id)
    if json:
        emit_json(plan_builtins(plan))
    else:
        emit(show.plan_text(plan))


def engines_command(json: Json = False) -> None:
    """List the engines that can run plans here."""
    offers = engines.offers(load_settings())
    if json:
        emit_json(offers)
        return
    rows = [
        (offer.name, offer.kind, offer.version or "n/a", offer.location or f"{offer.reason}; {offer.remedy}")
        for offer in offers
    ]
    emit(show.table(("engine", "kind", "version", "where"), rows))


def doctor_command(json: Json = False) -> None:
    """Check what Placewright needs here, with a remedy for everything that is missing."""
    checks = doctor.run_checks()
    if json:
        emit_json(checks)
    else:
        emit("\n".join(doctor.check_text(check) for check in checks))
    failed = [check.name for check in checks if check.state == "failed"]
    if failed:
        raise PlacewrightError(f"doctor found problems with: {', '.join(failed)}")


def mount(app: typer.Typer) -> None:
    """Adds the planner's commands to the command line."""
    app.command("inspect")(inspect_command)
    app.command("probe")(probe_command)
    app.command("plan")(plan_command)
    app.command("plans")(plans_command)
    app.command("show")(show_command)
    app.command("engines")(engines_command)
    app.command("doctor")(doctor_command)
    app.add_typer(bench_app, name="bench")
