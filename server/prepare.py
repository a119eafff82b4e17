"""From a checked request to a job for the engine: ids, sampling, stop strings, exact context check."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec

from configs.errors import RequestError
from configs.settings import SamplingDefaults
from server.checks import check_chat, check_sampling, completion_prompt, refuse_unserved
from server.job import Job
from server.schema import ChatRequest, CompletionRequest, SamplingFields
from server.service import Service
from worker.protocol import Generate, SamplingParams


async def prepare_chat(service: Service, request: ChatRequest) -> Job:
    """Raises RequestError for anything that cannot be served as asked."""
    check_chat(request)
    top = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    return await asyncio.to_thread(_prepare, service, request, "chatcmpl", top, max_tokens)


async def prepare_completion(service: Service, request: CompletionRequest) -> Job:
    """Raises RequestError for anything that cannot be served as asked."""
    return await asyncio.to_thread(_prepare, service, request, "cmpl", request.logprobs, request.max_tokens)


def _prepare(
    service: Service, request: SamplingFields, prefix: str, top_logprobs: int | None, max_tokens: int | None
) -> Job:
    """Runs in a thread: templates and tokenisers may take long."""
    refuse_unserved(request)
    if service.settings.strict_model_names:
        service.model.check_name(request.model)
    check_sampling(request, service.model.n_vocab)
    prompt_ids = _prompt_ids(service, request)
    options = request.stream_options
    generate = Generate(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        prompt_ids=prompt_ids,
        max_tokens=_fit(len(prompt_ids), max_tokens, service.context_length_tokens),
        sampling=sampling_params(request, service.settings.sampling, top_logprobs),
        stop_ids=[] if request.ignore_eos else sorted(service.text.tokenizer.end_ids),
        cache_prompt=request.cache_prompt is not False,
    )
    return Job(
        generate=generate,
        stop_strings=_stop_strings(request),
        model_name=request.model or service.model.name,
        created_unix_s=int(time.time()),
        stream=bool(request.stream),
        include_usage=service.settings.always_include_usage or bool(options and options.include_usage),
    )


def _prompt_ids(service: Service, request: SamplingFields) -> list[int]:
    if isinstance(request, ChatRequest):
        ids = service.text.prompt_ids(render_chat(service, request))
    else:
        assert isinstance(request, CompletionRequest)
        prompt = completion_prompt(request, service.model.n_vocab)
        ids = service.text.prompt_ids(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise RequestError("prompt: it holds no tokens, so there is nothing to continue", param="prompt")
    return ids


def render_chat(service: Service, request: ChatRequest) -> str:
    if service.text.template is None:
        raise RequestError(
            f"model {service.model.name} has no chat template; use /v1/completions", code="no_chat_template"
        )
    messages: list[dict[str, Any]] = msgspec.to_builtins(request.messages)
    return service.text.template.render(
        messages, add_generation_prompt=True, **(request.chat_template_kwargs or {})
    )


def sampling_params(
    request: SamplingFields, defaults: SamplingDefaults, top_logprobs: int | None
) -> SamplingParams:
    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return getattr(defaults, name) if value is None else value

    seed = request.seed
    return SamplingParams(
        temperature=chosen("temperature"),
        top_k=max(0, chosen("top_k")),
        top_p=chosen("top_p"),
        min_p=chosen("min_p"),
        repeat_penalty=chosen("repeat_penalty"),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=None if seed is None or seed == -1 else seed % 2**63,  # -1 is how many clients say "any"
        logit_bias=request.logit_bias or {},
        logprobs=top_logprobs,
    )


def _stop_strings(request: SamplingFields) -> tuple[str, ...]:
    stop = request.stop
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _fit(n_prompt: int, max_tokens: int | None, n_ctx: int) -> int:
    """How many tokens may be generated. Raises RequestError `context_length_exceeded` with both numbers."""
    if n_prompt + (max_tokens or 1) <= n_ctx:
        return max_tokens or n_ctx - n_prompt
    asked = f" and {max_tokens} for the completion" if max_tokens else ""
    raise RequestError(
        f"This model's maximum context length is {n_ctx} tokens. However, you requested {n_prompt} tokens in "
        f"the prompt{asked}. Please shorten the prompt or the completion.",
        code="context_length_exceeded",
        param="messages",
        details={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )
