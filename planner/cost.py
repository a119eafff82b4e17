"""Predicted seconds of a placement from bytes, multiply-adds and measured rates. Ranks and prunes, never chooses.

Everything is derived from the probe; where it has no rate the prediction is None and nothing is pruned on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from planner.memory import KV_BYTES_PER_ELEMENT
from plans.card import ModelCard, active_fraction
from plans.machine import MachineReport
from plans.placement import NATIVE, Placement
from plans.plan import RequestMix
from plans.units import Unit

# Hand-over between the threads of a team at an op boundary, and the ops of one layer (measured on Zen 4:
# 0.5-1.5 us).
_BARRIER_S = 1.0e-6
_OPS_PER_LAYER = 12


class Prediction(msgspec.Struct, frozen=True):
    """Seconds of one decoded token, of the mix's prompt, and of one request of the mix."""

    decode_token_s: float
    prefill_s: float
    request_s: float


class Work(msgspec.Struct, frozen=True):
    """What one token asks of each weight type: bytes read when decoding, multiply-adds when prefilling."""

    decode_bytes: dict[str, float]
    prefill_macs: dict[str, float]
    stored_bytes: dict[str, float]  # read once a prefill step, whatever its number of tokens


def work_of(card: ModelCard, units: Sequence[Unit] | None = None) -> Work:
    """The work of all units, or of some.

    An embedding is looked up, not multiplied, so it counts for nothing; the head runs once a sequence, so it counts
    for decode only.
    """
    decode: dict[str, float] = defaultdict(float)
    macs: dict[str, float] = defaultdict(float)
    stored: dict[str, float] = defaultdict(float)
    for unit in card.units if units is None else units:
        if unit.kind == "embedding":
            continue
        for role, tensor in unit.tensors.items():
            share = active_fraction(unit, role)
            decode[tensor.type] += tensor.bytes * share
            if unit.kind != "head" and len(tensor.shape) > 1:
                macs[tensor.type] += math.prod(tensor.shape) * share
                stored[tensor.type] += tensor.bytes
    return Work(dict(decode), dict(macs), dict(stored))


def _form(placement: Placement) -> str:
    return "packed" if placement.load_mode == "packed" else "file"


def _barriers_s(card: ModelCard, threads: int) -> float:
    return _BARRIER_S * _OPS_PER_LAYER * (card.n_layers or 1) * math.log2(2 * threads)


def predict_decode_s(
    card: ModelCard, work: Work, placement: Placement, report: MachineReport, cached_tokens: int
) -> float | None:
    """One token of one sequence behind `cached_tokens` of context; None when the memory rate is unknown."""
    threads = placement.decode_threads
    memory_rate = report.ram_bytes_per_s(threads)
    if memory_rate is None:
        return None
    seconds = _barriers_s(card, threads)
    for type_name, count in work.decode_bytes.items():
        rate = report.kernel(type_name, _form(placement), threads)
        measured = rate.decode_bytes_per_s if rate else None
        seconds += count / (measured or memory_rate)
    kv = cached_tokens * card.kv_elements_per_token * KV_BYTES_PER_ELEMENT[placement.kv_type]
    return seconds + kv / memory_rate


def predict_prefill_s(
    card: ModelCard, work: Work, placement: Placement, report: MachineReport, prompt_tokens: int
) -> float | None:
    """A prompt in chunks of `ubatch_tokens`; each takes the longer of computing and reading weights."""
    threads = placement.prefill_threads
    memory_rate = report.ram_bytes_per_s(threads)
    peak = max((rate.macs_per_s for rate in report.int8_peak if rate.threads <= threads), default=None)
    if memory_rate is None or peak is None:
        return None
    seconds = 0.0
    for first in range(0, prompt_tokens, placement.ubatch_tokens):
        tokens = min(placement.ubatch_tokens, prompt_tokens - first)
        for type_name, macs in work.prefill_macs.items():
            rate = report.kernel(type_name, _form(placement), threads)
            measured = rate.prefill_macs_per_s if rate else None
            computing = tokens * macs / (measured or peak / 2)
            seconds += max(computing, work.stored_bytes[type_name] / memory_rate)
        # scores and values of attention: each token meets half of this chunk and all before it
        seconds += tokens * (first + tokens / 2) * card.kv_elements_per_token / (peak / 4)
        seconds += _barriers_s(card, threads)
    return seconds


def predict(
    card: ModelCard, work: Work, placement: Placement, report: MachineReport, mix: RequestMix
) -> Prediction | None:
    """None for engines whose kernels were not probed and for models without units."""
    if placement.engine != NATIVE or not card.units:
        return None
    middle = mix.prompt_tokens + mix.output_tokens // 2
    decode_s = predict_decode_s(card, work, placement, report, middle)
    prefill_s = predict_prefill_s(card, work, placement, report, mix.prompt_tokens)
    if decode_s is None or prefill_s is None:
        return None
    return Prediction(decode_s, prefill_s, prefill_s + mix.output_tokens * decode_s)
