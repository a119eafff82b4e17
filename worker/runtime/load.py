"""From a model file and a placement to an executor: open, lower, pack, make the cache, the team and the step."""

from __future__ import annotations

import time
from pathlib import Path

from configs.errors import EngineStartError
from configs.progress import ProgressCallback, no_progress
from plans.placement import PAGE_TOKENS, Placement
from worker.cpu.library import load_library
from worker.cpu.lowered import lowered_structs
from worker.cpu.structs import KvType
from worker.model import archs
from worker.model.gguf import ModelFile, open_model
from worker.ops.lower import lower
from worker.ops.oplist import OpList
from worker.runtime.executor import Executor
from worker.runtime.step import NativeExecutor
from worker.runtime.weights import load_weights

KV_TYPES = {"f16": KvType.F16, "q8_0": KvType.Q8_0}


def load_executor(
    model_path: str | Path, placement: Placement, progress: ProgressCallback = no_progress
) -> Executor:
    """What the worker runs, chosen by the placement's devices.

    Raises ModelFileError for the file, EngineStartError for this machine.
    """
    max_outputs = max(placement.max_sequences, 16)
    if not placement.gpu_ordinals:
        return load_native(model_path, placement, progress=progress, max_outputs=max_outputs)
    from worker.runtime.load_gpu import load_gpu  # CuPy is loaded where a plan uses it, and nowhere else

    return load_gpu(model_path, placement, progress=progress, max_outputs=max_outputs)


def load_native(
    model_path: str | Path,
    placement: Placement,
    *,
    max_outputs: int,
    progress: ProgressCallback = no_progress,
) -> NativeExecutor:
    """Everything on the CPU, with a choice of how many rows of logits a step may have."""
    file = open_model(model_path)
    oplist = lower(archs.units(file))
    n_pages = page_count(placement, page_bytes(oplist, placement.kv_type))
    executor = native_executor(
        file, oplist, placement, n_pages=n_pages, max_outputs=max_outputs, progress=progress
    )
    progress("ready", 1, 1)
    return executor


def native_executor(
    file: ModelFile,
    oplist: OpList,
    placement: Placement,
    *,
    n_pages: int,
    max_outputs: int,
    progress: ProgressCallback,
) -> NativeExecutor:
    """An executor of `oplist`, which may be a part of the model."""
    started = time.monotonic()
    library = load_library()
    threads = max(placement.decode_threads, placement.prefill_threads)
    team = library.team_create(threads, placement.cpus[:threads] or None, placement.spin_us)
    weights = load_weights(
        library,
        file,
        oplist,
        packed=placement.load_mode == "packed",
        huge_pages=placement.huge_pages,
        threads=threads,
        progress=progress,
    )
    kv = None
    if oplist.kv_layers:
        heads = [layer.n_kv_heads for layer in oplist.kv_layers]
        head_dims = [layer.head_dim for layer in oplist.kv_layers]
        kv = library.kv_create(KV_TYPES[placement.kv_type], heads, head_dims, n_pages)
    ops, buffers = lowered_structs(oplist)
    ubatch = max(placement.ubatch_tokens, placement.max_sequences)
    step = library.step_create(ops, weights.structs, buffers, ubatch, max_outputs, team, kv)
    return NativeExecutor(library, oplist, step, kv, team, weights, placement, time.monotonic() - started)


def page_bytes(oplist: OpList, kv_type: str) -> int:
    """Least bytes of one page: what the cache stores of PAGE_TOKENS tokens in all layers."""
    values = sum(2 * layer.n_kv_heads * layer.head_dim for layer in oplist.kv_layers) * PAGE_TOKENS
    return values * 2 if kv_type == "f16" else values * 34 // 32


def page_count(placement: Placement, page_bytes: int) -> int:
    """As many pages as the budget holds, and never more than all sequences at full length need."""
    needed = -(-placement.context_length_tokens // PAGE_TOKENS)
    affordable = placement.kv_budget_bytes // page_bytes
    if affordable < needed:
        raise EngineStartError(
            f"a context of {placement.context_length_tokens} tokens needs {needed * page_bytes} bytes of KV cache, "
            f"the plan's budget is {placement.kv_budget_bytes}; plan with a smaller --ctx or --kv q8_0"
        )
    return int(min(affordable, needed * (placement.max_sequences + 1)))
