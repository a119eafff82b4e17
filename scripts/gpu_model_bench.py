"""Speed of the GPU executor on one model file, without a server: load, decode, prefill, batches, and where time goes.

    gpu_model_bench.py MODEL.gguf

Contexts are not computed first: the cache's pages are zero, and attention reads them all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plans.placement import GPU_ONLY, Placement
from worker.client import Deadlines
from worker.cuda.gpu_step import Exchange, GpuStep
from worker.cuda.lowering import Launch
from worker.cuda.sampling import STEPS_IN_FLIGHT
from worker.cuda.values import StepShape
from worker.engines.native import NativeEngine
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.ops.oplist import OpKind
from worker.ops.traffic import weight_bytes_per_token
from worker.protocol import Generate, SamplingParams
from worker.runtime.executor import (
    DRAWN,
    CancelFlag,
    Output,
    Sampler,
    SequencePart,
    StepBatch,
    StepFailed,
)
from worker.runtime.gpu_executor import GpuExecutor, step_batch_of
from worker.runtime.load_gpu import load_gpu

GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
CONTEXT_TOKENS = 33_024
CONTEXTS = (64, 512, 8_192, 32_768)
PROMPTS = (512, 2_048, 4_096)
BATCHES = (2, 4, 8, 16, 32)
DECODE_STEPS = 96
WORKER_SEQUENCES, WORKER_TOKENS = 16, 192


def ensure_model(folder: Path, shape: str) -> Path:
    """The synthetic model of that shape, written when it is not there."""
    path = folder / f"{shape}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        subprocess.run(
            [sys.executable, str(Path(__file__).parent / "synthetic-model"), str(partial), shape], check=True
        )
        partial.rename(path)
    return path


def placement() -> Placement:
    return Placement(
        engine="native",
        assignments=GPU_ONLY,
        context_length_tokens=CONTEXT_TOKENS,
        max_sequences=32,
        kv_type="f16",
        load_mode="packed",
        huge_pages=False,
        decode_threads=1,
        prefill_threads=1,
        ubatch_tokens=max(PROMPTS),
        kv_budget_bytes=12 << 30,
    )


def measure_model(path: Path) -> Iterator[tuple[str, str]]:
    """(what, how fast), as it is measured."""
    warm_page_cache(path)
    executor = load_gpu(path, placement(), max_outputs=32)
    yield "first load", load_words(executor, path)
    executor.close()
    executor = load_gpu(path, placement(), max_outputs=32)
    yield "load, kernels known", load_words(executor, path)
    yield "memory", ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in executor.memory_bytes().items())
    read_bytes = weight_bytes_per_token(executor.models[0].oplist)
    for context in CONTEXTS:
        seconds = decode_s(executor, 1, context)
        share = f"{read_bytes / seconds / 1e12:.2f} TB/s of weights"
        yield f"decode at {context}", f"{1 / seconds:,.1f} tok/s ({seconds * 1e6:.0f} us, {share})"
    for count in BATCHES:
        seconds = decode_s(executor, count, 512)
        yield f"decode, {count} sequences", f"{count / seconds:,.0f} tok/s together"
    for length in PROMPTS:
        try:
            yield f"prefill {length}", f"{length / prefill_s(executor, length):,.0f} tok/s"
        except StepFailed as error:
            ids = [(7919 * i) % executor.n_vocab for i in range(length)]
            words = first_not_finite(executor, ids, pages_of(executor, 0, length))
            yield f"prefill {length} FAILED", f"{error}: {words}"
    for length in (40, 300):
        yield from consistency(executor, length)
    for count in (1, *BATCHES):
        yield from breakdown(executor, count)
    yield "memory at the end", memory_words(executor)
    executor.close()


async def _through_worker(path: Path) -> list[tuple[str, str]]:
    """Decode through the worker's protocol, alone and WORKER_SEQUENCES side by side."""
    engine = NativeEngine(placement(), path, Deadlines())
    try:
        await engine.start()
        rows = []
        for count in (1, WORKER_SEQUENCES):
            await asyncio.gather(*(_request(engine, f"warm {count} {i}", i) for i in range(count)))
            rates = await asyncio.gather(*(_request(engine, f"{count} {i}", i) for i in range(count)))
            rows.append((f"worker, {count} at a time", f"{sum(rates):,.1f} tok/s decoding"))
        return rows
    finally:
        await engine.close()


async def _request(engine: NativeEngine, name: str, seed: int) -> float:
    """Tokens per second after the first token, by our own clock."""
    prompt = [(7919 * i + 31 * seed) % 100_000 for i in range(64)]
    request = Generate(name, prompt, WORKER_TOKENS, SamplingParams(temperature=0.0), cache_prompt=False)
    times = [time.perf_counter() async for _ in engine.generate(request)]
    return (len(times) - 2) / (times[-2] - times[0])  # the last event says that it is done


def measure_worker(path: Path) -> list[tuple[str, str]]:
    """The same model behind the worker process, whose overhead is then in the numbers."""
    return asyncio.run(_through_worker(path))


def load_words(executor: GpuExecutor, path: Path) -> str:
    upload_s = executor.models[0].upload_s
    rate = path.stat().st_size / upload_s
    return f"{executor.load_s:.2f} s in all; weights in {upload_s:.2f} s, {rate / 1e9:.1f} GB/s"


def memory_words(executor: GpuExecutor) -> str:
    """What was predicted for the device against what all processes together hold of it now."""
    model = executor.models[0]
    used_bytes = model.device.total_bytes - model.device.free_bytes()
    return f"predicted {model.need.total / 2**20:,.0f} MiB, in use {used_bytes / 2**20:,.0f} MiB"


def warm_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(64 << 20):
            pass


def pages_of(executor: GpuExecutor, sequence: int, n_tokens: int) -> list[int]:
    """Pages of their own as far as there are any; sharing them changes no speed."""
    count = -(-n_tokens // PAGE_TOKENS)
    return [(sequence * count + i) % executor.n_pages for i in range(count)]


def decode_s(executor: GpuExecutor, n_sequences: int, context: int) -> float:
    """Median seconds of a decode step, each queued behind the one before, as the scheduler does it."""
    pages = [pages_of(executor, s, context + DECODE_STEPS + 8) for s in range(n_sequences)]

    def batch(step: int, first_token: int = 0) -> StepBatch:
        """From `first_token` on, or of the tokens drawn by the step before."""
        parts = tuple(
            SequencePart(
                [first_token + s if first_token else DRAWN], context + step, page_ids, (Output(0, GREEDY),)
            )
            for s, page_ids in enumerate(pages)
        )
        return StepBatch(parts, n_sequences, n_sequences, not first_token)

    for step in range(STEPS_IN_FLIGHT):  # captures
        executor.run(batch(step, 1), CancelFlag())
    running = executor.submit(batch(STEPS_IN_FLIGHT, 1))
    times = []
    for step in range(STEPS_IN_FLIGHT + 1, DECODE_STEPS):
        started = time.perf_counter()
        behind = executor.submit(batch(step))
        assert running is not None and behind is not None
        executor.collect(running)
        running = behind
        times.append(time.perf_counter() - started)
    executor.collect(running)
    return sorted(times)[len(times) // 2]


def prefill_s(executor: GpuExecutor, length: int) -> float:
    """Best of three."""
    ids = [(7919 * i) % executor.n_vocab for i in range(length)]
    part = SequencePart(ids, 0, pages_of(executor, 0, length), (Output(length - 1, GREEDY),))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        executor.run(StepBatch((part,), length, 1), CancelFlag())
        times.append(time.perf_counter() - started)
    return min(times[1:])


def consistency(executor: GpuExecutor, length: int) -> Iterator[tuple[str, str]]:
    """The last logits of a prompt, once from a prefill and once token by token, must be the same but for rounding."""
    ids = [(7919 * i) % executor.n_vocab for i in range(length)]
    pages = pages_of(executor, 0, length)
    whole = executor.logits(Batch.of_sequence(ids, 0, pages, all_outputs=False))[0]
    if not np.isfinite(whole).all():
        yield f"prefill {length} not finite", first_not_finite(executor, ids, pages)
    for position, token in enumerate(ids):
        one = executor.logits(Batch.of_sequence([token], position, pages, all_outputs=False))[0]
        if not np.isfinite(one).all():
            yield f"decode at {position} not finite", first_not_finite(executor, [token], pages, position)
            return
    error = float(np.sqrt(np.mean(np.square(whole - one))) / one.std())
    yield (
        f"prefill {length} against decode",
        f"relative error {error:.4f}, same best {whole.argmax() == one.argmax()}",
    )


def first_not_finite(executor: GpuExecutor, ids: list[int], pages: list[int], position: int = 0) -> str:
    """The first op of a pass that leaves something that is not a finite number, with what it read."""
    model = executor.models[0]
    batch = Batch.of_sequence(ids, position, pages, all_outputs=False)
    prepared = executor._writer.write(step_batch_of(batch), None)
    shape = prepared.shape
    prepared.inputs.upload(shape.n_sequences)
    if shape.is_decode:
        model.kernels.receive(shape)
    for op, launch in zip(model.oplist.ops, model.launches, strict=True):
        before = {index: largest(executor, index, shape) for index in op.inputs}
        launch.enqueue(shape)
        for index in op.outputs if op.kind not in (OpKind.ROUTER, OpKind.SAMPLE) else ():
            if (found := largest(executor, index, shape)) is None or not np.isfinite(found[0]):
                names = {model.oplist.buffers[i].name: value for i, value in before.items()}
                types = [w.tensor.type for i in op.weights if (w := model.oplist.weights[i]).tensor]
                return (
                    f"{op.kind.name} of layer {op.layer} ({', '.join(types)}) writes {found} into "
                    f"{model.oplist.buffers[index].name}; it read (largest, not finite, first bad row) {names}"
                )
    return "nothing, op by op"


def largest(executor: GpuExecutor, buffer: int, shape: StepShape) -> tuple[float, int, int]:
    """Largest magnitude of the finite values of a buffer (not a number where some are not), how many are not, and the
    first row with one.
    """
    model = executor.models[0]
    rows = shape.n_outputs if model.oplist.buffers[buffer].is_output else shape.n_tokens
    where = model.buffers[buffer]
    host = model.device.host_buffer(4 * rows * where.width)
    model.device.synchronize()
    model.device.copy_out(host.address, where.values, 4 * rows * where.width)
    model.device.synchronize()
    values = host.array.view(np.float32).reshape(rows, where.width)
    bad = ~np.isfinite(values)
    found = (float(np.abs(values).max()), int(bad.sum()), int(bad.any(1).argmax()) if bad.any() else -1)
    host.close()
    return found


def breakdown(executor: GpuExecutor, n_sequences: int = 1) -> Iterator[tuple[str, str]]:
    """Microseconds of each kind of op in a decode step at 512 tokens, each kind alone in a graph."""
    decode_s(executor, n_sequences, 512)
    model = executor.models[0]
    inputs = model.decode_inputs.addresses
    shape = StepShape(n_sequences, n_sequences, n_sequences, 1024, True, inputs, 0, "greedy")
    of = f"  batch {n_sequences}:"
    whole_s = graph_s(executor, model.launches, shape)
    yield f"{of} the whole graph", f"{whole_s * 1e6:.1f} us, without Python and copies"
    counts = Counter(launch.kind for launch in model.launches)
    for kind, count in counts.items():
        alone = tuple(launch for launch in model.launches if launch.kind == kind)
        seconds = graph_s(executor, alone, shape)
        yield f"{of} {kind.name.lower()} x {count}", f"{seconds * 1e6:.1f} us a step"
    launcher = getattr(model.kernels, "launcher", None)
    if launcher is not None:
        before = launcher.n_launches
        for launch in model.launches:
            launch.enqueue(shape)
        model.device.synchronize()
        yield f"{of} launches a step", str(launcher.n_launches - before)


def graph_s(executor: GpuExecutor, launches: tuple[Launch, ...], shape: StepShape) -> float:
    nothing = Exchange(*[lambda _: None] * 4)
    step = GpuStep(executor.models[0].device, launches, nothing)
    times = []
    for _ in range(12):
        started = time.perf_counter()
        step.decode(shape)
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[5]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    path = parser.parse_args().model
    for measure in (measure_model, measure_worker):
        for name, value in measure(path):
            print(f"{name}: {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
