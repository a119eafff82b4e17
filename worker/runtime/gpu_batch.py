"""From a StepBatch to the pinned arrays that a device reads, and from its answers back to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.cuda.attention import prefill_tiles
from worker.cuda.gpu_step import bucket_for, context_limit_for
from worker.cuda.sampler import STATUS_WORDS
from worker.cuda.sampling import MOST_BIASES, SamplingBuffers
from worker.cuda.step_inputs import StepInputs
from worker.cuda.values import Sampling, StepShape
from worker.runtime.executor import Output, SampledToken, Sampler, SequencePart, StepBatch, StepFailed

NO_TARGET = -1


@dataclass(frozen=True)
class PreparedStep:
    """A step whose inputs lie in pinned memory."""

    shape: StepShape
    inputs: StepInputs
    outputs: tuple[Output, ...]
    n_history: int = 0
    n_biases: int = 0


class BatchWriter:
    """Fills the input blocks. Rows of a decode bucket that no sequence uses write to the scratch page."""

    def __init__(self, decode: StepInputs, prefill: StepInputs, tile_rows: int, scratch_page: int) -> None:
        self._decode, self._prefill = decode, prefill
        self._tile_rows, self._scratch_page = tile_rows, scratch_page
        bucket = decode.limits.max_tokens
        decode.sequence_of_token[:bucket] = np.arange(bucket)
        decode.output_rows[:bucket] = np.arange(bucket)

    def write(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        """`sampling` None: another part of the machine has the head."""
        if self._fits_bucket(batch):
            return self._write_decode(batch, sampling)
        return self._write_prefill(batch, sampling)

    def _fits_bucket(self, batch: StepBatch) -> bool:
        one_each = batch.is_decode and all(len(part.outputs) == 1 for part in batch.parts)
        return one_each and len(batch.parts) <= self._decode.limits.max_sequences

    def _write_decode(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        inputs, count = self._decode, len(batch.parts)
        bucket = bucket_for(count)
        assert bucket is not None
        for row, part in enumerate(batch.parts):
            inputs.token_ids[row] = part.token_ids[0]
            inputs.positions[row] = part.first_position
            inputs.set_pages(row, part.page_ids, part.first_position + 1)
        for row in range(count, bucket):
            inputs.token_ids[row] = inputs.positions[row] = 0
            inputs.set_pages(row, [self._scratch_page], 1)
        n_positions = max(part.first_position for part in batch.parts) + 1
        outputs = tuple(part.outputs[0] for part in batch.parts)
        kind, n_history, n_biases = write_samplers(inputs, outputs, bucket, sampling)
        limit = context_limit_for(n_positions)
        shape = StepShape(bucket, bucket, bucket, limit, True, inputs.addresses, 0, kind)
        return PreparedStep(shape, inputs, outputs, n_history, n_biases)

    def _write_prefill(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        inputs, outputs = self._prefill, []
        first = np.zeros(len(batch.parts) + 1, np.int32)
        row = n_positions = 0
        for sequence, part in enumerate(batch.parts):
            end = row + len(part.token_ids)
            _write_part(inputs, part, row, end, sequence)
            for output in part.outputs:
                inputs.output_rows[len(outputs)] = row + output.row
                outputs.append(output)
            n_positions = max(n_positions, part.first_position + len(part.token_ids))
            first[sequence + 1] = row = end
        n_tiles = self._write_tiles(inputs, first)
        kind, n_history, n_biases = write_samplers(inputs, tuple(outputs), len(outputs), sampling)
        shape = StepShape(
            n_tokens=row,
            n_sequences=len(batch.parts),
            n_outputs=len(outputs),
            context_limit=context_limit_for(n_positions),
            is_decode=False,
            inputs=inputs.addresses,
            n_tiles=n_tiles,
            sampling=kind,
        )
        return PreparedStep(shape, inputs, tuple(outputs), n_history, n_biases)

    def _write_tiles(self, inputs: StepInputs, sequence_first: np.ndarray) -> int:
        tiles = prefill_tiles(sequence_first, inputs.positions, self._tile_rows)
        inputs.tiles[: len(tiles)] = tiles
        return len(tiles)


def _write_part(inputs: StepInputs, part: SequencePart, row: int, end: int, sequence: int) -> None:
    inputs.token_ids[row:end] = part.token_ids
    inputs.positions[row:end] = np.arange(part.first_position, part.first_position + end - row)
    inputs.sequence_of_token[row:end] = sequence
    inputs.set_pages(sequence, part.page_ids, part.first_position + end - row)


def write_samplers(
    inputs: StepInputs, outputs: tuple[Output, ...], n_rows: int, sampling: SamplingBuffers | None
) -> tuple[Sampling, int, int]:
    """Records of the outputs, padding rows greedy; the kind of sampling and how much of the pools is in use."""
    if sampling is None or not outputs:
        return "none", 0, 0
    if all(_is_plain_greedy(output) for output in outputs):
        return "greedy", 0, 0
    n_history = n_biases = 0
    for row, output in enumerate(outputs):
        n_history, n_biases = _write_sampler(inputs.samplers[row], output, sampling, n_history, n_biases)
    for row in range(len(outputs), n_rows):
        _write_settings(inputs.samplers[row], _GREEDY, 0)
        inputs.samplers[row]["n_history"] = inputs.samplers[row]["n_bias"] = 0
    return "full", n_history, n_biases


_GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)


def _is_plain_greedy(output: Output) -> bool:
    sampler = output.sampler
    return (
        sampler is not None
        and sampler.temperature <= 0
        and sampler.top < 0
        and not sampler.bias_ids
        and not output.history
    )


def _write_settings(record: np.void, sampler: Sampler, draw: int) -> None:
    for name in ("seed", "temperature", "top_k", "top_p", "min_p"):
        record[name] = getattr(sampler, name)
    for name in ("repeat_penalty", "presence_penalty", "frequency_penalty"):
        record[name] = getattr(sampler, name)
    record["draw"], record["n_top"], record["target"] = draw, sampler.top, NO_TARGET


def _write_sampler(
    record: np.void, output: Output, sampling: SamplingBuffers, n_history: int, n_biases: int
) -> tuple[int, int]:
    """Fill one record; returns the pools' new lengths. Raises StepFailed when a pool is full."""
    sampler = output.sampler or _GREEDY
    _write_settings(record, sampler, output.draw)
    if output.target is not None:
        record["target"], record["n_top"] = output.target, output.top
    history_end, bias_end = n_history + len(output.history), n_biases + len(sampler.bias_ids)
    if bias_end > MOST_BIASES or history_end > len(sampling.history):
        raise StepFailed(
            f"the step's outputs have {bias_end} biased and {history_end} penalised tokens together; the GPU's pools "
            f"hold {MOST_BIASES} and {len(sampling.history)}"
        )
    sampling.history[n_history:history_end] = output.history
    sampling.bias_ids[n_biases:bias_end] = sampler.bias_ids
    sampling.bias_values[n_biases:bias_end] = sampler.bias_values
    record["first_history"], record["n_history"] = n_history, len(output.history)
    record["first_bias"], record["n_bias"] = n_biases, len(sampler.bias_ids)
    return history_end, bias_end


def read_answers(prepared: PreparedStep, sampling: SamplingBuffers) -> list[SampledToken]:
    """One answer per output. Raises StepFailed for logits that can not be used."""
    if prepared.shape.sampling == "greedy":
        ids = sampling.tokens[: len(prepared.outputs)].tolist()
        if min(ids) < 0:
            raise StepFailed(STATUS_WORDS[1])
        return [SampledToken(token) for token in ids]
    return [_answer(sampling.sampled[row], output) for row, output in enumerate(prepared.outputs)]


def _answer(record: np.void, output: Output) -> SampledToken:
    if status := int(record["status"]):
        raise StepFailed(STATUS_WORDS[status])
    token = int(record["token"])
    if output.sampler is not None and output.sampler.top < 0:
        return SampledToken(token)
    count = int(record["n_top"])
    ids, logprobs = record["top_ids"][:count].tolist(), record["top_logprobs"][:count].tolist()
    return SampledToken(token, float(record["logprob"]), list(zip(ids, logprobs, strict=True)))
