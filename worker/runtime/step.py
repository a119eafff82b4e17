"""The native executor: turns a StepBatch into the arrays of the C ABI and runs it with one call.

Everything is allocated once. At one token a step Python writes a dozen integers and reads one struct back.
"""

from __future__ import annotations

from ctypes import sizeof

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError
from plans.placement import PAGE_TOKENS, Placement
from worker.cpu.handles import KvCache, Step, Team
from worker.cpu.library import Library
from worker.cpu.step_arrays import StepArrays
from worker.cpu.structs import SampledStruct, SamplerStruct, WeightStruct
from worker.ops.batch import Batch, PageTables
from worker.ops.oplist import OpList
from worker.runtime.executor import (
    CancelFlag,
    Output,
    SampledToken,
    Sampler,
    StepBatch,
    StepCancelled,
    StepFailed,
)
from worker.runtime.weights import LoadedWeights

# Greedy sampling under this bias picks the target, whose raw log probability is then reported.
FORCED_BIAS = np.float32(1e30)


class NativeExecutor:
    """Executor (worker/runtime/executor.py) on the CPU library. Used from one thread."""

    def __init__(
        self,
        library: Library,
        oplist: OpList,
        step: Step,
        kv: KvCache | None,  # None: a part of a model without attention
        team: Team,
        weights: LoadedWeights,
        placement: Placement,
        load_s: float,
    ) -> None:
        self.library, self.oplist, self.step, self.kv = library, oplist, step, kv
        self.load_s = load_s
        self._team, self._weights, self._placement = team, weights, placement
        max_pages = -(-placement.context_length_tokens // PAGE_TOKENS) + 1
        max_sequences = max(placement.max_sequences, 1) + 1  # one more for a score request
        self._arrays = StepArrays(step.max_tokens, max_sequences, step.max_outputs, max_pages)
        self._slots = [_SamplerSlot(self._arrays, i) for i in range(step.max_outputs)]
        self._sampled = list(self._arrays.sampled)
        self._drawn = np.frombuffer(memoryview(self._arrays.sampled), np.int32)[
            :: sizeof(SampledStruct) // 4
        ].data
        self._page_tables = PageTables(self._arrays.page_tables)
        # memoryviews, since setting one number of an array takes a long way through numpy
        self._token_ids, self._positions = self._arrays.token_ids.data, self._arrays.positions.data
        # For so many sequences with one token and one output each the arrays are laid out already; 0 = for none.
        self._one_each = 0

    @property
    def weight_structs(self) -> list[WeightStruct]:
        """The weights as the kernels see them, in the order of the op list; for measuring."""
        return self._weights.structs

    @property
    def n_vocab(self) -> int:
        return self.oplist.n_vocab

    @property
    def n_pages(self) -> int:
        return self.kv.n_pages if self.kv else 0

    @property
    def max_tokens(self) -> int:
        return self.step.max_tokens

    @property
    def max_outputs(self) -> int:
        return self.step.max_outputs

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        outputs = self._fill(batch)
        struct = self._arrays.struct
        struct.cancel = cancel.address
        placement = self._placement
        threads = placement.decode_threads if batch.is_decode else placement.prefill_threads
        try:
            finished = self.step.run(struct, threads)
        except EngineError as error:
            raise StepFailed(str(error)) from error
        if not finished:
            raise StepCancelled("the step was cancelled")
        return [
            SampledToken(self._drawn[row])
            if output.sampler is not None and output.sampler.top < 0
            else _with_logprobs(self._sampled[row])
            for row, output in enumerate(outputs)
        ]

    def _fill(self, batch: StepBatch) -> list[Output]:
        if batch.is_decode and batch.n_outputs == batch.n_tokens:
            return self._fill_one_each(batch)
        self._one_each = 0
        arrays, struct = self._arrays, self._arrays.struct
        outputs: list[Output] = []
        row = 0
        for sequence, part in enumerate(batch.parts):
            end = row + len(part.token_ids)
            arrays.token_ids[row:end] = part.token_ids
            arrays.positions[row:end] = np.arange(part.first_position, part.first_position + end - row)
            arrays.sequence_first[sequence] = row
            self._page_tables.set(sequence, part.page_ids, part.first_position + end - row)
            for output in part.outputs:
                arrays.output_rows[len(outputs)] = row + output.row
                self._slots[len(outputs)].set(output)
                outputs.append(output)
            row = end
        arrays.sequence_first[len(batch.parts)] = row
        struct.n_tokens, struct.n_sequences, struct.n_outputs = row, len(batch.parts), len(outputs)
        return outputs

    def _fill_one_each(self, batch: StepBatch) -> list[Output]:
        """A decode step: what is the same as in the last one is left as it is."""
        token_ids, positions, count = self._token_ids, self._positions, len(batch.parts)
        outputs: list[Output] = []
        for row, part in enumerate(batch.parts):
            token_ids[row], positions[row] = part.token_ids[0], part.first_position
            self._page_tables.set(row, part.page_ids, part.first_position + 1)
            self._slots[row].set(part.outputs[0])
            outputs.append(part.outputs[0])
        if count != self._one_each:
            self._one_each = count
            arrays, struct = self._arrays, self._arrays.struct
            arrays.sequence_first[: count + 1] = np.arange(count + 1)
            arrays.output_rows[:count] = np.arange(count)
            struct.n_tokens = struct.n_sequences = struct.n_outputs = count
        return outputs

    def logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits f32 [n_outputs, n_vocab] of a batch of one sequence; for tests and measuring."""
        arrays = StepArrays(
            self.step.max_tokens, len(batch.page_tables), self.max_outputs, batch.page_tables.shape[1], False
        )
        out = np.empty((len(batch.output_rows), self.n_vocab), np.float32)
        arrays.set_logits(out)
        for name in ("token_ids", "positions", "sequence_first", "output_rows"):
            getattr(arrays, name)[: len(getattr(batch, name))] = getattr(batch, name)
        arrays.page_tables[:] = batch.page_tables
        struct = arrays.struct
        struct.n_tokens, struct.n_outputs = len(batch.token_ids), len(batch.output_rows)
        struct.n_sequences = len(batch.page_tables)
        self.step.run(struct, self._placement.prefill_threads)
        return out

    def copy_page(self, source: int, destination: int) -> None:
        if self.kv is not None:
            self.kv.copy_page(source, destination)

    def memory_bytes(self) -> dict[str, int]:
        return {
            "weights": self._weights.resident_bytes,
            "kv": self.kv.page_bytes * self.kv.n_pages if self.kv else 0,
            "workspace": self.step.workspace_bytes,
        }

    def close(self) -> None:
        self.step.close()
        if self.kv is not None:
            self.kv.close()
        self._team.close()
        if self._weights.arena is not None:
            self._weights.arena.close()


class _SamplerSlot:
    """The sampler of one output; rewritten only as far as the output differs from the last one."""

    __slots__ = ("_arrays", "_draws", "_output", "_sampler", "_struct")

    def __init__(self, arrays: StepArrays, output: int) -> None:
        self._arrays, self._output = arrays, output
        self._struct: SamplerStruct = arrays.samplers[output]
        self._sampler: Sampler | None = None
        self._draws = False  # chance has a part in it

    def set(self, output: Output) -> None:
        if output.sampler is None:
            self._force(output)
            return
        if output.sampler is not self._sampler:
            self._configure(output.sampler)
        if self._draws:
            self._struct.draw = output.draw
        if len(output.history) or self._struct.n_history:
            self._arrays.set_history(self._output, np.asarray(output.history, np.int32))

    def _configure(self, sampler: Sampler) -> None:
        struct, self._sampler = self._struct, sampler
        for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"):
            setattr(struct, name, getattr(sampler, name))
        struct.presence_penalty = sampler.presence_penalty
        struct.frequency_penalty = sampler.frequency_penalty
        struct.n_top = sampler.top
        self._draws = sampler.temperature > 0
        self._set_bias(sampler.bias_ids, sampler.bias_values)

    def _force(self, output: Output) -> None:
        """Greedy with an overwhelming bias on the target."""
        assert output.target is not None
        greedy = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, (), (), output.top)
        self._configure(greedy)
        self._set_bias((output.target,), (float(FORCED_BIAS),))
        self._struct.n_history = 0

    def _set_bias(self, ids: tuple[int, ...], values: tuple[float, ...]) -> None:
        self._arrays.set_bias(self._output, np.asarray(ids, np.int32), np.asarray(values, np.float32))


def _with_logprobs(sampled: SampledStruct) -> SampledToken:
    count = sampled.n_top
    top = list(zip(sampled.top_ids[:count], sampled.top_logprobs[:count], strict=True))
    return SampledToken(sampled.token, sampled.logprob, top)
