"""From a checked request to a job for the engine: ids, sampling, stop strings, exact context check."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, NamedTuple

import msgspec

from configs.errors import RequestError
from server.checks import check_chat, check_sampling, completion_prompt, refuse_unserved
from server.job import Job
from server.schema import ChatRequest, CompletionRequest, SamplingFields
from server.service import Service
from worker.protocol import Generate, SamplingParams

SMALLEST_TOP_P = 1e-6  # keeps one token; engines compute in single precision, where less may be zero


class Terms(NamedTuple):
    """Where the two APIs call the same thing by other names."""

    id_prefix: str
    prompt_field: str
    max_tokens: int | None
    top_logprobs: int | None


async def prepare_chat(service: Service, request: ChatRequest) -> Job:
    """Raises RequestError for anything that cannot be served as asked."""
    check_chat(request)
    _check(service, request)
    async with service.admission.rendering:
        prompt_ids = await asyncio.to_thread(_chat_ids, service, request)
    max_tokens = request.max_completion_tokens or request.max_tokens
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _make_job(service, request, prompt_ids, Terms("chatcmpl", "messages", max_tokens, top_logprobs))


async def prepare_completion(service: Service, request: CompletionRequest) -> Job:
    """Raises RequestError for anything that cannot be served as asked."""
    _check(service, request)
    prompt = completion_prompt(request, service.model.n_vocab)
    if isinstance(prompt, str):
        prompt = await asyncio.to_thread(_prompt_ids, service, prompt, "prompt")
    terms = Terms("cmpl", "prompt", request.max_tokens, request.logprobs)
    return _make_job(service, request, prompt, terms)


def _check(service: Service, request: SamplingFields) -> None:
    refuse_unserved(request)
    if service.settings.strict_model_names:
        service.model.check_name(request.model)
    check_sampling(request, service.model.n_vocab)


def _chat_ids(service: Service, request: ChatRequest) -> list[int]:
    """Runs in a thread: templates and tokenizers may take long."""
    if service.text.template is None:
        raise RequestError(
            f"model {service.model.name} has no chat template; use /v1/completions", code="no_chat_template"
        )
    messages: list[dict[str, Any]] = msgspec.to_builtins(request.messages)
    options = request.chat_template_kwargs or {}
    prompt = service.text.template.render(messages, add_generation_prompt=True, **options)
    return _prompt_ids(service, prompt, "messages")


def _prompt_ids(service: Service, prompt: str, field: str) -> list[int]:
    """Ids of a prompt that may fit; one that surely does not is refused before it is tokenized."""
    fewest, n_ctx = service.text.tokenizer.fewest_tokens(prompt), service.context_length_tokens
    if fewest > n_ctx:
        raise _too_long(f"at least {fewest} tokens in the prompt", field, fewest, n_ctx)
    return service.text.prompt_ids(prompt)


def _make_job(service: Service, request: SamplingFields, prompt_ids: list[int], terms: Terms) -> Job:
    options = request.stream_options
    generate = Generate(
        request_id=f"{terms.id_prefix}-{uuid.uuid4().hex}",
        prompt_ids=prompt_ids,
        max_tokens=_fit(len(prompt_ids), terms, service.context_length_tokens),
        sampling=_sampling(request, service, terms.top_logprobs),
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


def _sampling(request: SamplingFields, service: Service, top_logprobs: int | None) -> SamplingParams:
    defaults = service.settings.sampling

    def chosen(name: str) -> Any:
        value = getattr(request, name)
        return getattr(defaults, name) if value is None else value

    seed = request.seed
    return SamplingParams(
        temperature=chosen("temperature"),
        top_k=min(max(0, chosen("top_k")), service.model.n_vocab),  # more than there are is no limit
        top_p=max(chosen("top_p"), SMALLEST_TOP_P),
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


def _fit(n_prompt: int, terms: Terms, n_ctx: int) -> int:
    """How many tokens may be generated. Raises RequestError `context_length_exceeded` with both numbers."""
    if n_prompt == 0:
        message = f"{terms.prompt_field}: no tokens, so there is nothing to continue"
        raise RequestError(message, param=terms.prompt_field)
    if n_prompt + (terms.max_tokens or 1) <= n_ctx:
        return terms.max_tokens or n_ctx - n_prompt
    asked = f" and {terms.max_tokens} for the completion" if terms.max_tokens else ""
    raise _too_long(f"{n_prompt} tokens in the prompt{asked}", terms.prompt_field, n_prompt, n_ctx)


def _too_long(asked: str, field: str, n_prompt: int, n_ctx: int) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {n_ctx} tokens. However, you requested {asked}. "
        "Please shorten the prompt or the completion.",
        code="context_length_exceeded",
        param=field,
        details={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )
