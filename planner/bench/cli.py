"""`placewright bench ...`: races and checks of saved plans. Tables go to stdout; `--json` prints one document."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from configs.errors import UserError
from configs.settings import load_settings
from planner import flags
from planner.bench.common import RaceResult, SideSummary
from planner.bench.run import RaceTask, race, settings_margin_bytes
from planner.budget import Lengths
from planner.context import encoder_of
from planner.engines import builds_of, make_factory
from planner.output import emit, emit_json
from planner.progress import make_reporter
from planner.statistics import Interval
from planner.turn import measuring_turn
from plans import host, show
from plans.key import open_verified_plan
from plans.plan import RequestMix

bench_app = typer.Typer(no_args_is_help=True, help="Race a plan against a tuned baseline.")


@bench_app.callback()
def _group() -> None:
    """Race a plan against a tuned baseline."""


@bench_app.command("run")
def run_command(
    plan_id: flags.PlanId,
    baseline: flags.Baseline = "llama-server",
    rounds: flags.Rounds = 7,
    threads: flags.PinnedThreads = None,
    tune: flags.Tune = True,
    prompt_tokens: flags.PromptTokens = 512,
    output_tokens: flags.OutputTokens = 128,
    prompts: flags.Prompts = None,
    seed: flags.Seed = 0,
    json: flags.Json = False,
) -> None:
    """Race PLAN_ID against a tuned baseline on the same file and token ids; ratios with 95 % intervals."""
    settings = load_settings()
    plan = open_verified_plan(plan_id)
    builds_of((baseline,), settings)  # refuses a baseline that is not there before anything starts
    check_threads(threads, plan.host.cpus[0].cores_available)
    mix = fitting(prompt_tokens, output_tokens, plan.placement.context_length_tokens)
    task = RaceTask(
        plan=plan,
        baseline=baseline,
        lengths=Lengths(mix.prompt_tokens, mix.output_tokens),
        rounds=rounds,
        threads=threads,
        tune=tune,
        seed=seed,
        prompts=prompts,
    )
    model_path = Path(plan.model.paths[0])
    limit = max(0, host.ram_available_bytes() - settings_margin_bytes(settings))
    with make_reporter() as reporter, measuring_turn(reporter):
        reporter.stage(f"race plan {plan.id[:12]} against {baseline}, {rounds} rounds")
        factory = make_factory(model_path, settings)
        result = asyncio.run(race(task, factory, encoder_of(model_path), limit, reporter))
    if json:
        emit_json(result)
    else:
        emit(race_text(result))


def check_threads(threads: int | None, cores: int) -> None:
    """Raises UserError for more threads than this process has cores."""
    if threads is not None and threads > cores:
        raise UserError(
            f"--threads {threads} cannot be met: this process may use {cores} cores; use 1 to {cores}"
        )


def fitting(prompt_tokens: int, output_tokens: int, context_length_tokens: int) -> RequestMix:
    """Lengths that fit into the plan's context. Raises UserError with all numbers."""
    if prompt_tokens + output_tokens > context_length_tokens:
        raise UserError(
            f"--prompt-tokens {prompt_tokens} and --output-tokens {output_tokens} exceed the plan's context of "
            f"{context_length_tokens} tokens; use fewer"
        )
    return RequestMix(prompt_tokens, output_tokens)


def _interval_text(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.ratio:.2f}x"
    return f"{interval.ratio:.2f}x ({interval.low:.2f} to {interval.high:.2f}, {interval.n} pairs)"


def _row(side: SideSummary) -> tuple[str, ...]:
    share = "n/a" if side.ram_share is None else f"{100 * side.ram_share:.0f} %"
    return (
        f"{side.name}: {side.engine}",
        f"{side.threads_decode}/{side.threads_prefill}",
        show.number_text(side.prefill_tokens_per_s),
        show.number_text(side.decode_tokens_per_s),
        show.number_text(side.ttft_s, 3),
        show.rate_text(side.decode_bytes_per_s),
        share,
    )


def race_text(result: RaceResult) -> str:
    head = ("side", "threads", "prefill tok/s", "decode tok/s", "TTFT s", "decode reads", "of RAM rate")
    lines = [
        f"{result.model}: {result.prompt_tokens} prompt and {result.output_tokens} output tokens",
        show.table(head, [_row(result.plan), _row(result.baseline)]),
        f"  prefill: {_interval_text(result.prefill_speedup)} the baseline's speed",
        f"  decode:  {_interval_text(result.decode_speedup)} the baseline's speed",
        f"  baseline: {result.baseline.engine} {result.baseline.version}",
        *(
            f"  {side.name}: decoded ids of its own choice (it cannot be fed given ones)"
            for side in (result.plan, result.baseline)
            if not side.forced_output
        ),
        *(f"  tuned: {words}" for words in result.tuning),
        *(f"  overlay: {words}" for words in result.overlay),
    ]
    return "\n".join(lines)
