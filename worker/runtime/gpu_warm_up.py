"""Before the first request: compile the kernels of usual steps side by side, tune and capture decode, run one of each.

All of it works on page 0, which nobody has yet, so nothing of it is seen later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from worker.cuda.driver import Launcher
from worker.cuda.gpu_step import BUCKETS
from worker.cuda.model import DeviceModel
from worker.cuda.tuned import apply_settings, load_settings, store_settings, tuned_file
from worker.cuda.tuning import graph_s, log_breakdown, tune_placement
from worker.cuda.values import StepShape
from worker.ops.batch import PAGE_TOKENS
from worker.ops.traffic import weight_bytes_per_token
from worker.runtime.executor import CancelFlag, Output, SampledToken, Sampler, SequencePart, StepBatch
from worker.runtime.gpu_batch import PreparedStep

TUNED_CONTEXT_TOKENS = 512
PROMPT_TOKENS = (12, 48, 512)  # beside the largest: other kernels serve such prompts
MOST_RUN_TOKENS = 512  # longer prompts need no libraries that these did not start, only kernels
GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
SAMPLED = Sampler(1.0, 40, 0.9, 0.0, 1.0, 0.0, 0.0, 1)


class Warmed(Protocol):
    """What is asked of the executor."""

    models: tuple[DeviceModel, ...]
    max_tokens: int

    def prepare(self, batch: StepBatch) -> PreparedStep: ...

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]: ...


def compile_ahead(executor: Warmed, batches: list[StepBatch]) -> None:
    """Begin to compile what steps of these batches need; weights need not be there yet."""
    for model in executor.models:
        model.device.bind()
        shapes = [executor.prepare(batch).shape for batch in batches]
        model.kernels.compile_ahead(lambda model=model, shapes=shapes: _everything(model, shapes))  # type: ignore[misc]


def _everything(model: DeviceModel, shapes: list[StepShape]) -> None:
    model.kernels.derive_weights()
    _enqueue_all(model, shapes)


def warm_up(executor: Warmed, batches: list[StepBatch], *, is_whole: bool) -> None:
    """Load the kernels of the batches and run the shorter ones. `is_whole`: one GPU has the whole model, so that its
    decode graph can be tuned."""
    for model in executor.models:
        model.device.bind()
        model.kernels.load_compiled()
    if is_whole and batches:
        _tune(executor)
    for batch in batches:
        if batch.n_tokens > MOST_RUN_TOKENS:
            continue
        executor.run(batch, CancelFlag())
        if batch.is_decode:  # each of the two blocks of inputs has a graph of its own
            executor.run(batch, CancelFlag())


def usual_batches(executor: Warmed, n_sequences: int) -> Iterator[StepBatch]:
    for count in sorted({*(size for size in BUCKETS if size < n_sequences), n_sequences}):
        parts = tuple(SequencePart([0], 0, [0], (Output(0, GREEDY),)) for _ in range(count))
        yield StepBatch(parts, count, count)
    yield StepBatch((SequencePart([0], 0, [0], (Output(0, SAMPLED),)),), 1, 1)
    for length in sorted(
        {min(count, executor.max_tokens) for count in (*PROMPT_TOKENS, executor.max_tokens)}
    ):
        pages = [0] * (-(-length // PAGE_TOKENS))
        yield StepBatch((SequencePart([0] * length, 0, pages, (Output(length - 1, GREEDY),)),), length, 1)


def _enqueue_all(model: DeviceModel, shapes: list[StepShape]) -> None:
    for shape in shapes:
        if shape.is_decode:
            model.kernels.receive(shape)
        for launch in model.launches:
            launch.enqueue(shape)
        model.kernels.send(shape)


def _tune(executor: Warmed) -> None:
    """Try where the kernels of the decode graph at TUNED_CONTEXT_TOKENS start and lie."""
    model = executor.models[0]
    launcher = getattr(model.kernels, "launcher", None)
    if launcher is None or not launcher.has_dependent_launch:
        return
    position = min(TUNED_CONTEXT_TOKENS, model.limits.context_length_tokens) - 1
    part = SequencePart([0], position, [0] * (position // PAGE_TOKENS + 1), (Output(0, GREEDY),))
    prepared = executor.prepare(StepBatch((part,), 1, 1))
    prepared.inputs.upload(prepared.shape.n_sequences)
    token_s = _tuned_graph_s(model, launcher, lambda: _enqueue_all(model, [prepared.shape]))
    weight_bytes = weight_bytes_per_token(model.oplist)
    log_breakdown(model.device, model.launches, prepared.shape, token_s, weight_bytes)


def _tuned_graph_s(model: DeviceModel, launcher: Launcher, enqueue: Callable[[], None]) -> float:
    """Seconds of the decode graph, tuned now or as an earlier load has tuned it."""
    launcher.early_functions = {}
    enqueue()
    model.device.synchronize()
    functions, launcher.early_functions = list(launcher.early_functions), None
    card = f"{model.device.name} {launcher.driver_version}"
    file = tuned_file(card, model.oplist, functions)
    known = load_settings(file)
    if known is not None and apply_settings(functions, known):
        seconds = graph_s(model.device, enqueue)
        if known.is_confirmed_by(seconds):
            return seconds
    token_s = tune_placement(model.device, launcher, enqueue)
    store_settings(file, functions, token_s)
    return token_s
