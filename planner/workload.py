"""What a plan is asked for: the user's request, checked against the model, becomes a Workload.

A workload names the context of one sequence, how many run at a time, which KV types may be chosen and the
request mix that scores are stated for.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from configs.errors import PlanError
from configs.settings import SMALLEST_CONTEXT_TOKENS
from plans.card import ModelCard
from plans.placement import KvType
from plans.plan import Limits, RequestMix, Workload
from worker.model.metadata import MOST_WHOLE

MIX = RequestMix(prompt_tokens=512, output_tokens=128)
MOST_SEQUENCES = 256


class PlanRequest(msgspec.Struct, frozen=True):
    """Everything that `placewright plan` was told. None means: choose."""

    model_path: Path
    context_length_tokens: int | None = None
    default_context_length_tokens: int = 4096
    concurrency: int = 1
    kv_types: tuple[str, ...] = ("f16",)
    limits: Limits = Limits()
    budget_s: float = 120.0
    prompts: str | None = None
    replan: bool = False
    reprobe: bool = False
    dry_run: bool = False
    seed: int = 0


def check_context(card: ModelCard, asked: int | None, default_tokens: int) -> int:
    """The context of one sequence. Raises PlanError when the model was not made for what was asked."""
    longest = card.context_length_tokens
    if asked is None:
        return min(default_tokens, longest or default_tokens)
    if not SMALLEST_CONTEXT_TOKENS <= asked <= MOST_WHOLE:
        raise PlanError(
            f"--ctx {asked} is out of range; use {SMALLEST_CONTEXT_TOKENS} to {longest or MOST_WHOLE}"
        )
    if longest is not None and asked > longest:
        raise PlanError(
            f"--ctx {asked} exceeds the {longest} tokens that {card.name} was made for; use --ctx {longest}"
        )
    return asked


def check_kv_types(asked: tuple[str, ...]) -> tuple[KvType, ...]:
    known = get_args(KvType)
    for name in asked:
        if name not in known:
            raise PlanError(
                f"--kv {name} is not a KV type; there are {', '.join(known)} (a list lets the search choose)"
            )
    return tuple(kv_type for kv_type in known if kv_type in asked)


def mix_for(context_length_tokens: int) -> RequestMix:
    """The standard mix, or its 4 to 1 shape shrunk into a smaller context."""
    if context_length_tokens >= MIX.prompt_tokens + MIX.output_tokens:
        return MIX
    return RequestMix(context_length_tokens * 4 // 5, context_length_tokens // 5)


def make_workload(card: ModelCard, request: PlanRequest, prompts_sha256: str = "") -> Workload:
    """Raises PlanError for a request that this model cannot meet."""
    if not 1 <= request.concurrency <= MOST_SEQUENCES:
        raise PlanError(f"--concurrency {request.concurrency} is out of range; use 1 to {MOST_SEQUENCES}")
    context = check_context(card, request.context_length_tokens, request.default_context_length_tokens)
    return Workload(
        context_length_tokens=context,
        concurrency=request.concurrency,
        kv_types=check_kv_types(request.kv_types),
        mix=mix_for(context),
        prompts=request.prompts or "built-in",
        prompts_sha256=prompts_sha256,
    )
