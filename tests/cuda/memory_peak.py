"""How much of a GPU one process takes at most: load under a cap, prefill up to the full context, decode many sequences.

    python -m tests.cuda.memory_peak MODEL.gguf CAP_MIB CONTEXT_TOKENS SEQUENCES UBATCH_TOKENS

Prints JSON with MiB: `peak` seen by the driver's management library above what was taken before this process touched
the device, and `predicted`. A process of its own, because contexts and kernels of earlier tests would be counted.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from plans.placement import GPU_ONLY, Placement
from tests.cuda.executors import GREEDY
from worker.cuda import nvml
from worker.ops.batch import PAGE_TOKENS
from worker.runtime.executor import CancelFlag, Output, Sampler, SequencePart, StepBatch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.load_gpu import load_gpu

MIB = 1 << 20
SAMPLED = Sampler(1.0, 40, 0.9, 0.0, 1.0, 0.0, 0.0, 1)
_PERIOD_S = 0.001


class Watch:
    """Asks the driver once a millisecond how much of CUDA's device 0 is taken, by whomever."""

    def __init__(self) -> None:
        import cupy

        self._bus_id: str = cupy.cuda.runtime.deviceGetPCIBusId(0)  # makes no context
        self.before = self.peak = self.used()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def used(self) -> int:
        used_bytes = nvml.used_bytes(self._bus_id)
        assert used_bytes is not None, "the driver's management library does not answer"
        return used_bytes

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self.peak = max(self.peak, self.used())

    def own_bytes(self) -> int:
        """Most that was taken so far above the beginning."""
        self.peak = max(self.peak, self.used())
        return self.peak - self.before

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def placement(cap_mib: int, context_tokens: int, sequences: int, ubatch_tokens: int) -> Placement:
    return Placement(
        engine="native",
        assignments=GPU_ONLY,
        context_length_tokens=context_tokens,
        max_sequences=sequences,
        kv_type="f16",
        load_mode="packed",
        huge_pages=False,
        decode_threads=1,
        prefill_threads=1,
        ubatch_tokens=ubatch_tokens,
        kv_budget_bytes=12 << 30,
        gpu_memory_mib=(cap_mib,),
    )


def pages_for(executor: GpuExecutor, sequence: int, n_tokens: int) -> list[int]:
    count = -(-n_tokens // PAGE_TOKENS)
    return [(sequence * count + index) % executor.n_pages for index in range(count)]


def prefill(executor: GpuExecutor, context_tokens: int) -> None:
    """A prompt as long as the context, in steps of the largest size."""
    pages = pages_for(executor, 0, context_tokens)
    for begin in range(0, context_tokens, executor.max_tokens):
        count = min(executor.max_tokens, context_tokens - begin)
        end = pages[: -(-(begin + count) // PAGE_TOKENS)]
        part = SequencePart([7] * count, begin, end, (Output(count - 1, GREEDY),))
        executor.run(StepBatch((part,), count, 1), CancelFlag())


def decode(executor: GpuExecutor, sequences: int, position: int, sampler: Sampler) -> None:
    """Three steps of a shape: op by op, captured, from the graph."""
    for _ in range(3):
        parts = tuple(
            SequencePart([7], position, pages_for(executor, sequence, position + 1), (Output(0, sampler),))
            for sequence in range(sequences)
        )
        executor.run(StepBatch(parts, sequences, sequences), CancelFlag())


def main() -> None:
    model, sizes = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    cap_mib, context_tokens, sequences, ubatch_tokens = sizes
    watch = Watch()
    executor = load_gpu(model, placement(cap_mib, context_tokens, sequences, ubatch_tokens), max_outputs=32)
    stages = {"load": watch.own_bytes()}
    prefill(executor, context_tokens)
    stages["prefill"] = watch.own_bytes()
    classes = [1 << power for power in range(9, context_tokens.bit_length())]
    for position in sorted({*(size - 1 for size in classes), context_tokens - 1}):
        for count in (1, 2, 4, 8, 16, 32):
            for sampler in (GREEDY, SAMPLED):
                if count <= sequences:
                    decode(executor, count, position, sampler)
    stages["decode"] = watch.own_bytes()
    watch.close()
    answer = {
        "peak": {stage: round(size_bytes / MIB, 1) for stage, size_bytes in stages.items()},
        "predicted": round(executor.models[0].need.total / MIB, 1),
        "taken": round(executor.models[0].memory.total_bytes / MIB, 1),
        "graphs": executor.counters.graphs_captured,
    }
    executor.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
