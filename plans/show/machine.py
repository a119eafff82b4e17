"""The probe's report as text."""

from __future__ import annotations

from plans.machine import GpuRates, MachineReport
from plans.show.text import bytes_text, number_text, rate_text, table


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
        ("kernels, by form of the weights and threads", _KERNEL_HEAD, _kernel_rows(report)),
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
