"""One plan as text, and the list of all plans as text and as JSON-ready values."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from configs.errors import printable
from plans.placement import Placement
from plans.plan import CandidateResult, Plan, plan_builtins
from plans.show.rejected import rejected_lines
from plans.show.text import bytes_text, number_text, table
from plans.store import PlanListing


def listing_builtins(listing: PlanListing) -> list[dict[str, Any]]:
    """Plans as full objects; damaged files as objects with `damaged`."""
    damaged = [{"id": None, "file": item.name, "damaged": item.reason} for item in listing.damaged]
    return [*(plan_builtins(plan) for plan in listing.plans), *damaged]


CANDIDATE_KEY = (
    "Candidates: engine, d and p: decode and prefill threads, u: tokens of a step, weights, KV type."
)


def _winner(plan: Plan) -> CandidateResult | None:
    """The evidence of the placement that was chosen; it is the first row."""
    return plan.evidence.candidates[0] if plan.evidence.candidates else None


def _moment_text(moment: str) -> str:
    return moment[:16].replace("T", " ")


def listing_text(listing: PlanListing) -> str:
    rows = []
    for plan in listing.plans:
        best = _winner(plan)
        rows.append(
            (
                plan.id[:12],
                printable(Path(plan.model.paths[0]).stem[:36]),  # as `serve` names it: tells quants apart
                plan.placement.engine,
                f"{plan.workload.context_length_tokens} x {plan.workload.concurrency}",
                number_text(best.prefill_tokens_per_s if best else None),
                number_text(best.decode_tokens_per_s if best else None),
                _moment_text(plan.created_at),
            )
        )
    lines = [
        table(("id", "model", "engine", "context", "prefill tok/s", "decode tok/s", "created UTC"), rows)
    ]
    lines += [f"  damaged: {item.name}: {item.reason}" for item in listing.damaged]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    placement, evidence, mix = plan.placement, plan.evidence, plan.workload.mix
    lines = [
        f"plan {plan.id}",
        f"  model      {plan.model.name} ({plan.model.architecture}, {bytes_text(plan.model.bytes)})",
        f"  file       {printable(plan.model.paths[0])}",
        f"  engine     {placement.engine} {plan.engine_build.version}",
        f"  workload   {plan.workload.concurrency} sequence(s) of {placement.context_length_tokens} tokens, "
        f"KV {placement.kv_type}",
        f"  runs with  {placement.decode_threads} decode and {placement.prefill_threads} prefill threads, steps of "
        f"{placement.ubatch_tokens} tokens, weights {placement.load_mode}"
        + (" on huge pages" if placement.huge_pages else ""),
        f"  memory     {bytes_text(plan.memory.total_bytes)} predicted: "
        f"weights {bytes_text(plan.memory.weights_bytes)}, "
        f"KV {bytes_text(plan.memory.kv_bytes)}, workspace {bytes_text(plan.memory.workspace_bytes)}",
        *_gpu_memory_lines(plan),
        *_layer_lines(placement),
        f"  machine    {plan.key.machine_fingerprint} ({plan.host.cpus[0].model_name})",
        f"  made       {_moment_text(plan.created_at)} UTC by Placewright {plan.placewright_version}, "
        f"{evidence.spent_s:.1f} s of measuring",
        f"  chosen     {evidence.chosen_because}",
        f"  decided    {evidence.decided}",
        *([f"  undecided  {undecided_text(plan)}"] if evidence.undecided else []),
        "",
        f"  Score: seconds of a request of {mix.prompt_tokens} prompt and {mix.output_tokens} output tokens.",
        f"  {CANDIDATE_KEY}",
        table(_RESULT_HEAD, [_result_row(row) for row in evidence.candidates]),
        "",
        *rejected_lines(plan),
    ]
    return "\n".join(lines)


def undecided_text(plan: Plan) -> str:
    """What the budget left open, and what to do about it."""
    evidence = plan.evidence
    return (
        f"the budget of {evidence.budget_s:g} s ended before the chosen one could be told apart from "
        f"{', '.join(evidence.undecided)}; plan again with --replan and a larger --budget-s"
    )


def _gpu_memory_lines(plan: Plan) -> list[str]:
    return [
        f"  gpu{ordinal}       {bytes_text(need.total_bytes)} predicted: weights {bytes_text(need.weights_bytes)}, "
        f"KV {bytes_text(need.kv_bytes)}, workspace {bytes_text(need.workspace_bytes)}, "
        f"driver {bytes_text(need.context_bytes)}"
        for ordinal, need in zip(plan.placement.gpu_ordinals, plan.gpu_memory, strict=True)
    ]


def _layer_lines(placement: Placement) -> list[str]:
    """Where the layers are, if not all in one place."""
    placed = Counter(item.device for item in placement.assignments if item.units.startswith("layer."))
    if not placed:
        return []
    words = [f"{count} on {device}" for device, count in sorted(placed.items())]
    rest = f"the others on {placement.assignments[0].device}"
    if placement.passing_tokens:
        rest += f", passing through a GPU in steps of {placement.passing_tokens} tokens or more"
    return [f"  layers     {', '.join([*words, rest])}"]


_RESULT_HEAD = (
    "candidate",
    "trials",
    "prefill tok/s",
    "decode tok/s",
    "TTFT s",
    "score s",
    "time/chosen's",
    "95 %",
)


def _result_row(row: CandidateResult) -> tuple[str, ...]:
    ends = "n/a"
    if row.ratio_low is not None and row.ratio_high is not None:
        ends = f"{row.ratio_low:.3f}-{row.ratio_high:.3f}"
    return (
        row.candidate,
        str(row.warm_trials),
        number_text(row.prefill_tokens_per_s),
        number_text(row.decode_tokens_per_s),
        number_text(row.ttft_s, 3),
        number_text(row.score_s, 3),
        number_text(row.ratio_to_best, 3),
        ends,
    )
