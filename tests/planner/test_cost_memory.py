"""Predictions: the arithmetic of bytes and rates, and what is short by how much."""

from __future__ import annotations

import msgspec
import pytest

from planner.cost import predict, predict_decode_s, predict_prefill_s, work_of
from planner.memory import (
    host_limit_bytes,
    kv_bytes,
    predict_memory,
    resident_need,
    shortage,
    weights_bytes,
)
from plans.plan import Limits, MemoryNeed, RequestMix
from plans.units import MoeShape, Unit
from tests.planner.fakes import N_EMBD, N_FF, N_LAYERS, card, machine, placement, tensor


def test_work_counts_the_head_for_decode_and_not_for_prefill() -> None:
    model, work = card(), work_of(card())
    layer = N_EMBD * (2 * N_EMBD + 2 * 256) + 3 * N_EMBD * N_FF
    assert work.prefill_macs["Q4_0"] == N_LAYERS * layer
    assert work.decode_bytes["Q4_0"] == model.file_bytes  # the tied head reads the embedding's table


def test_decode_time_is_bytes_over_the_measured_rate() -> None:
    model, report = card(), machine()
    seconds = predict_decode_s(model, work_of(model), placement(decode_threads=1), report, 0)
    assert seconds == pytest.approx(model.file_bytes / 18e9, rel=0.05)


def test_weights_beyond_the_cache_are_read_no_faster_than_memory() -> None:
    """Kernels were probed at 90 GB/s, where memory gives 20; the model is twice the cache, or half of it."""
    model, report = card(), machine(cores=1)
    fast = tuple(msgspec.structs.replace(rate, decode_bytes_per_s=90e9) for rate in report.kernels)
    work, read_bytes = work_of(model), sum(work_of(model).decode_bytes.values())
    for cache_share, rate in ((0.5, 20e9), (2.0, 90e9)):
        cpu = msgspec.structs.replace(report.host.cpus[0], l3_bytes=int(read_bytes * cache_share))
        here = msgspec.structs.replace(
            report, kernels=fast, host=msgspec.structs.replace(report.host, cpus=(cpu,))
        )
        seconds = predict_decode_s(model, work, placement(decode_threads=1), here, 0)
        assert seconds == pytest.approx(read_bytes / rate, rel=0.15)


def test_context_makes_decode_slower() -> None:
    model, report, work = card(), machine(), work_of(card())
    short = predict_decode_s(model, work, placement(), report, 0)
    long = predict_decode_s(model, work, placement(), report, 4096)
    small = predict_decode_s(model, work, placement(kv_type="q8_0"), report, 4096)
    assert short is not None and long is not None and small is not None
    assert short < small < long


def test_prefill_scales_with_threads_and_tokens() -> None:
    model, report, work = card(), machine(), work_of(card())
    one = predict_prefill_s(model, work, placement(prefill_threads=1), report, 512)
    four = predict_prefill_s(model, work, placement(prefill_threads=4), report, 512)
    twice = predict_prefill_s(model, work, placement(prefill_threads=4), report, 1024)
    assert one is not None and four is not None and twice is not None
    assert one / four == pytest.approx(4, rel=0.1)
    assert twice > 1.9 * four


def test_small_steps_read_the_weights_again_and_again() -> None:
    model, report, work = card(), machine(cores=4), work_of(card())
    tiny = predict_prefill_s(model, work, placement(ubatch_tokens=1), report, 512)
    large = predict_prefill_s(model, work, placement(ubatch_tokens=512), report, 512)
    assert tiny is not None and large is not None and tiny > 2 * large


def test_mapped_weights_are_slower() -> None:
    model, report, mix = card(), machine(), RequestMix(512, 128)
    packed = predict(model, work_of(model), placement(), report, mix)
    mapped = predict(model, work_of(model), placement(load_mode="mmap"), report, mix)
    assert packed is not None and mapped is not None and mapped.request_s > packed.request_s


@pytest.mark.parametrize(("engine", "measured"), [("llama-server", True), ("native", False)])
def test_what_was_not_measured_is_not_predicted(engine: str, measured: bool) -> None:
    report = machine(measured=measured)
    assert predict(card(), work_of(card()), placement(engine=engine), report, RequestMix(512, 128)) is None


def test_experts_count_by_those_used() -> None:
    stack = msgspec.structs.replace(tensor("gate_exps", N_EMBD, N_FF), shape=(N_EMBD, N_FF, 8), bytes=8000)
    shape = MoeShape(8, 2, N_FF, "silu", 1e-5)
    unit = Unit("layer.0.ffn", "moe_ffn", 0, {"gate_experts": stack}, shape)
    work = work_of(msgspec.structs.replace(card(), units=(unit,)))
    assert work.decode_bytes["Q4_0"] == 2000
    assert work.prefill_macs["Q4_0"] == N_EMBD * N_FF * 2
    assert work.stored_bytes["Q4_0"] == 8000


def test_kv_is_counted_in_whole_pages() -> None:
    model = card()
    page = 32 * model.kv_elements_per_token * 2
    assert kv_bytes(model, "f16", 1, 1) == page
    assert kv_bytes(model, "f16", 33, 2) == 4 * page
    assert kv_bytes(model, "q8_0", 4096, 1) < kv_bytes(model, "f16", 4096, 1)


def test_packed_weights_cost_a_little_more() -> None:
    model = card()
    assert weights_bytes(model, "native", "mmap") == model.file_bytes
    assert model.file_bytes < weights_bytes(model, "native", "packed") < 1.1 * model.file_bytes
    assert weights_bytes(model, "llama-server", "packed") == model.file_bytes


def test_larger_steps_need_more_workspace() -> None:
    small = predict_memory(card(), placement(ubatch_tokens=64)).workspace_bytes
    assert predict_memory(card(), placement(ubatch_tokens=1024)).workspace_bytes > small


def test_the_limit_is_what_is_free_less_the_margin_or_the_cap() -> None:
    report = machine(available_bytes=8 << 30)
    assert host_limit_bytes(report, Limits()) == 7 << 30
    assert host_limit_bytes(report, Limits(host_memory_mib=1024)) == 1 << 30
    assert host_limit_bytes(report, Limits(host_memory_mib=1 << 20)) == 7 << 30
    assert host_limit_bytes(machine(available_bytes=1), Limits()) == 0


@pytest.mark.parametrize(
    ("load_mode", "streaming", "limit", "words"),
    [
        ("packed", False, 6 << 20, None),
        ("packed", False, 5 << 20, "1 MiB short"),
        ("mmap", True, 3 << 20, None),
        ("mmap", False, 3 << 20, "3 MiB short"),
        ("packed", True, 3 << 20, "3 MiB short"),
    ],
)
def test_a_shortage_is_said_with_its_size_and_streamed_weights_need_no_room(
    load_mode: str, streaming: bool, limit: int, words: str | None
) -> None:
    found = shortage(resident_need(MemoryNeed(3 << 20, 2 << 20, 1 << 20), load_mode, streaming), limit)
    assert found is None if words is None else (found is not None and words in found)


def test_the_parts_of_a_shortage_make_its_sum() -> None:
    need = MemoryNeed(92 << 20, 90 << 20, 163 << 20)
    streamed = shortage(resident_need(need, "mmap", True), 200 << 20)
    assert streamed is not None and streamed.startswith(
        "needs 253 MiB of RAM (weights streamed, KV 90 MiB, workspace 163 MiB), may use 200 MiB: 53 MiB short"
    )
    kept = shortage(resident_need(need, "mmap", False), 200 << 20)
    assert kept is not None and kept.startswith(
        "needs 345 MiB of RAM (weights 92 MiB, KV 90 MiB, workspace 163 MiB)"
    )
