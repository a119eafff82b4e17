"""Cards, reports and plans as text and as JSON-ready values. Pure: it reads nothing and prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from plans.card import ModelCard
from plans.machine import GpuRates, MachineReport
from plans.placement import Placement
from plans.plan import CandidateResult, Plan, plan_builtins
from plans.store import PlanListing


def bytes_text(count: float | None) -> str:
    if count is None:
        return "n/a"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def number_text(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def rate_text(bytes_per_s: float | None) -> str:
    return "n/a" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f} GB/s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is text, the others are aligned to the right."""
    if not rows:
        return "  (none)"
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


# ---- cards
# ------------------------------------------------------------------------------------------------------


def card_builtins(card: ModelCard) -> dict[str, Any]:
    """A card as plain values; a unit is summed up to name, kind, layer, bytes and types."""
    content: dict[str, Any] = msgspec.to_builtins(card)
    content["native_supported"] = card.supported
    content["kv_elements_per_token"] = card.kv_elements_per_token
    content["units"] = [
        {
            "name": unit.name,
            "kind": unit.kind,
            "layer": unit.layer,
            "bytes": unit.bytes,
            "types": sorted({tensor.type for tensor in unit.tensors.values()}),
        }
        for unit in card.units
    ]
    return content


def card_text(card: ModelCard) -> str:
    experts = f", {card.n_experts} experts ({card.n_experts_used} used)" if card.n_experts else ""
    shape = f"{card.n_layers or 'n/a'} layers, width {card.n_embd or 'n/a'}{experts}"
    native = "runs" if card.supported else f"does not run: {card.native_reason}"
    template = "with" if card.has_chat_template else "without"
    tokenizer = f"{card.tokenizer or 'n/a'} ({card.pre_tokenizer or 'n/a'}), {template} chat template"
    if card.tokenizer_reason:
        tokenizer += f"; can not be used: {card.tokenizer_reason}"
    head = [
        f"{card.name}",
        f"  architecture  {card.architecture}: {shape}",
        f"  parameters    {card.parameters / 1e6:,.1f} M in {bytes_text(card.file_bytes)}, {len(card.paths)} file(s)",
        f"  context       {card.context_length_tokens or 'n/a'} tokens, vocabulary {card.n_vocab or 'n/a'}",
        f"  tokenizer     {tokenizer}",
        f"  KV cache      {bytes_text(2 * card.kv_elements_per_token or None)} a token in f16",
        f"  native        {native}",
    ]
    types = [(entry.type, bytes_text(entry.bytes), str(entry.tensors)) for entry in card.types]
    kinds = [(entry.kind, bytes_text(entry.bytes), str(entry.tensors)) for entry in card.kinds]
    return "\n".join(
        [
            *head,
            "",
            table(("type", "bytes", "tensors"), types),
            "",
            table(("part", "bytes", "tensors"), kinds),
        ]
    )


# ---- machines
# ---------------------------------------------------------------------------------------------------


def report_text(report: MachineReport) -> str:
    host = report.host
    lines = [f"machine {host.fingerprint}, measured {report.measured_at} in {report.probe_s:.1f} s"]
    for cpu in host.cpus:
        lines.append(f"  CPU   {cpu.model_name}: {cpu.cores_available} of {cpu.cores_online} cores usable")
        lines.append(
            f"        L1d {bytes_text(cpu.l1d_bytes)}, L2 {bytes_text(cpu.l2_bytes)}, L3 {bytes_text(cpu.l3_bytes)}; "
            f"kernels run at {report.isa or 'n/a'}"
        )
    lines.append(
        f"  RAM   {bytes_text(host.ram_total_bytes)}, {bytes_text(report.ram_available_bytes)} available"
    )
    lines.append(f"  GPU   {', '.join(gpu.name for gpu in host.gpus) or f'none: {host.gpus_absent_reason}'}")
    sections = [
        ("RAM read", ("threads", "pages", "GB/s"), _read_rows(report)),
        ("int8 peak", ("threads", "GMAC/s"), _peak_rows(report)),
        ("kernels (weights in their place, one thread count a row)", _KERNEL_HEAD, _kernel_rows(report)),
        (f"disk below {report.disk_folder}", ("mode", "block", "depth", "rate"), _disk_rows(report)),
    ]
    for title, head, rows in sections:
        lines += ["", f"  {title}", table(head, rows)]
    lines += [line for gpu in report.gpus for line in _gpu_lines(gpu)]
    if report.others_cpu_share is not None:
        lines.append(f"  other programs used {100 * report.others_cpu_share:.0f} % of the CPUs meanwhile")
    lines += [f"  not measured: {reason}" for reason in report.missing]
    return "\n".join(lines)


_KERNEL_HEAD = ("type", "form", "threads", "decode GB/s", "prefill GMAC/s")


def _gpu_lines(gpu: GpuRates) -> list[str]:
    """A device in a few lines and a table of its kernels."""
    link = f"PCIe {gpu.link_generation or 'n/a'} x{gpu.link_width or 'n/a'}"
    lines = [
        f"  gpu{gpu.ordinal}  {gpu.name}, driver {gpu.driver_version}, {bytes_text(gpu.memory_free_bytes)} of "
        f"{bytes_text(gpu.memory_total_bytes)} free, {link}, {number_text(gpu.clock_mhz)} MHz",
        f"        memory read {rate_text(gpu.read_bytes_per_s)}, "
        f"pinned RAM read {rate_text(gpu.zero_copy_bytes_per_s)}, "
        f"launch {_us_text(gpu.launch_s)}, graph node {_us_text(gpu.graph_node_s)}, "
        f"hand-over {_us_text(gpu.handover_s)}",
    ]
    lines += [f"        shared with {process}" for process in gpu.foreign_processes]
    copies = [(r.kind, bytes_text(r.block_bytes), number_text(r.bytes_per_s / 1e9)) for r in gpu.copies]
    kernels = [
        (
            rate.type,
            f"{rate.rows} x {rate.columns}",
            rate_text(rate.decode_bytes_per_s),
            number_text(rate.prefill_macs_per_s and rate.prefill_macs_per_s / 1e12),
        )
        for rate in gpu.kernels
    ]
    lines += [
        table(("copy", "block", "GB/s"), copies),
        table(("type", "shape", "decode", "prefill TMAC/s"), kernels),
    ]
    return lines + [f"  gpu{gpu.ordinal} not measured: {reason}" for reason in gpu.missing]


def _us_text(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e6:.2f} us"


def _read_rows(report: MachineReport) -> list[tuple[str, ...]]:
    return [
        (str(rate.threads), "huge" if rate.huge_pages else "small", number_text(rate.bytes_per_s / 1e9))
        for rate in report.ram_read
    ]


def _peak_rows(report: MachineReport) -> list[tuple[str, ...]]:
    return [(str(rate.threads), number_text(rate.macs_per_s / 1e9)) for rate in report.int8_peak]


def _kernel_rows(report: MachineReport) -> list[tuple[str, ...]]:
    return [
        (
            rate.type,
            rate.form,
            str(rate.threads),
            number_text(rate.decode_bytes_per_s and rate.decode_bytes_per_s / 1e9),
            number_text(rate.prefill_macs_per_s and rate.prefill_macs_per_s / 1e9)
            + (f" ({rate.reason})" if rate.reason else ""),
        )
        for rate in report.kernels
    ]


def _disk_rows(report: MachineReport) -> list[tuple[str, ...]]:
    return [
        (rate.mode, bytes_text(rate.block_bytes), str(rate.depth), rate.reason or rate_text(rate.bytes_per_s))
        for rate in report.disk
    ]


# ---- plans
# ------------------------------------------------------------------------------------------------------


def listing_builtins(listing: PlanListing) -> list[dict[str, Any]]:
    """Plans as full objects; damaged files as objects with `damaged`."""
    damaged = [{"id": None, "file": item.name, "damaged": item.reason} for item in listing.damaged]
    return [*(plan_builtins(plan) for plan in listing.plans), *damaged]


def winner_of(plan: Plan) -> CandidateResult | None:
    """The evidence of the placement that was chosen; it is the first row."""
    return plan.evidence.candidates[0] if plan.evidence.candidates else None


def listing_text(listing: PlanListing) -> str:
    rows = []
    for plan in listing.plans:
        best = winner_of(plan)
        rows.append(
            (
                plan.id[:12],
                plan.model.name[:36],
                plan.placement.engine,
                f"{plan.workload.context_length_tokens} x {plan.workload.concurrency}",
                number_text(best.prefill_tokens_per_s if best else None),
                number_text(best.decode_tokens_per_s if best else None),
                plan.created_at[:16].replace("T", " "),
            )
        )
    lines = [table(("id", "model", "engine", "context", "prefill tok/s", "decode tok/s", "created"), rows)]
    lines += [f"  damaged: {item.name}: {item.reason}" for item in listing.damaged]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    placement, evidence, mix = plan.placement, plan.evidence, plan.workload.mix
    lines = [
        f"plan {plan.id}",
        f"  model      {plan.model.name} ({plan.model.architecture}, {bytes_text(plan.model.bytes)})",
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
        f"  made       {plan.created_at} by {plan.placewright_version}, {evidence.spent_s:.1f} s of measuring",
        f"  chosen     {evidence.chosen_because}",
        f"  decided    {evidence.decided}",
        "",
        f"  Score: seconds of a request of {mix.prompt_tokens} prompt and {mix.output_tokens} output tokens.",
        table(_RESULT_HEAD, [_result_row(row) for row in evidence.candidates]),
        "",
        f"  {sum(row.count for row in plan.rejected)} other candidates were rejected:",
        *_rejected_lines(plan),
    ]
    return "\n".join(lines)


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


_RESULT_HEAD = ("candidate", "trials", "prefill tok/s", "decode tok/s", "TTFT s", "score s", "ratio", "95 %")


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


def _rejected_lines(plan: Plan, most: int = 12) -> list[str]:
    """Those that were measured first; they are the most interesting."""
    order = {"confirm": 0, "measure": 1, "engine": 2, "memory": 3, "cost": 4}
    rows = sorted(plan.rejected, key=lambda row: order[row.stage])
    lines = []
    for row in rows[:most]:
        times = f" and {row.count - 1} like it" if row.count > 1 else ""
        lines.append(f"    {row.stage}: {row.candidate}{times}: {row.reason}")
    if len(rows) > most:
        lines.append(f"    ... {len(rows) - most} more reasons in the file (--json)")
    return lines
