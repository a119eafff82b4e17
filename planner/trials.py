"""One timed run through an engine: the same ids for every engine, timed where a user would time it.

Time to first token, prefill and decode rates come from the client's clock. The first token belongs to the
prefill, the output has a fixed length, and nothing is reused from an earlier prompt.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from configs.errors import MeasureError, TrialTimeoutError
from planner.passages import Passage
from plans.plan import RequestMix
from worker.engines.base import Engine
from worker.protocol import Done, Generate, SamplingParams, TokenEvent

Clock = Callable[[], float]
GREEDY = SamplingParams(temperature=0.0, seed=0)
_numbers = itertools.count()


class Timing(msgspec.Struct, frozen=True):
    """Of one request or of several side by side (`prompt_tokens` and `output_tokens` are sums then).

    Requests that start to decode while others are still in their prefill slow that prefill down; the tokens that they
    get meanwhile are not counted as decoded in `decode_s`.
    """

    prompt_tokens: int
    output_tokens: int
    ttft_s: float  # mean over the requests
    prefill_s: float  # from the start until every request has its first token
    decode_s: float  # from there until the last token
    decode_steps: int  # tokens in that time

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_steps / self.decode_s

    @property
    def wall_s(self) -> float:
        return self.prefill_s + self.decode_s


def score_s(prefill_tokens_per_s: float, decode_tokens_per_s: float, mix: RequestMix) -> float:
    """Seconds of one request of the mix at these rates."""
    return mix.prompt_tokens / prefill_tokens_per_s + mix.output_tokens / decode_tokens_per_s


async def _stamps(engine: Engine, passage: Passage, clock: Clock) -> list[float]:
    """When each token of one request arrived. Raises MeasureError when the work was not what was asked for."""
    request = Generate(
        request_id=f"trial-{next(_numbers)}",
        prompt_ids=list(passage.prompt_ids),
        max_tokens=len(passage.output_ids),
        sampling=GREEDY,
        teacher_ids=list(passage.output_ids),
        cache_prompt=False,
    )
    stamps: list[float] = []
    reason = "nothing"
    async for event in engine.generate(request):
        if isinstance(event, TokenEvent):
            stamps.append(clock())
        elif isinstance(event, Done):
            reason = event.reason
            n_cached = event.timings.cached_tokens or 0
            if n_cached > 1:  # a begin-of-sequence token may be shared
                raise MeasureError(f"reused {n_cached} tokens of an earlier prompt")
    if len(stamps) != len(passage.output_ids):
        raise MeasureError(
            f"asked for {len(passage.output_ids)} tokens, got {len(stamps)} (ended by {reason})"
        )
    return stamps


async def time_passages(engine: Engine, passages: list[Passage], clock: Clock) -> Timing:
    """Runs the passages side by side. Raises EngineError, or MeasureError when the engine did other work."""
    start = clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stamps(engine, passage, clock)) for passage in passages]
    stamps = [task.result() for task in tasks]
    first, last = max(item[0] for item in stamps), max(item[-1] for item in stamps)
    steps = sum(stamp > first for item in stamps for stamp in item)
    if first <= start or last <= first:
        raise MeasureError("the clock did not advance between the tokens of a trial; use a longer output")
    return Timing(
        prompt_tokens=sum(len(passage.prompt_ids) for passage in passages),
        output_tokens=sum(len(item) for item in stamps),
        ttft_s=sum(item[0] - start for item in stamps) / len(stamps),
        prefill_s=first - start,
        decode_s=last - first,
        decode_steps=steps,
    )


async def time_one(engine: Engine, passages: list[Passage], clock: Clock, timeout_s: float) -> Timing:
    """`time_passages` under a time limit; single errors come out of their group. Raises TrialTimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await time_passages(engine, passages, clock)
    except TimeoutError as error:
        raise TrialTimeoutError(f"stopped after {timeout_s:.0f} s without finishing a trial") from error
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
