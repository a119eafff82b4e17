"""From a StepBatch to the pinned arrays that a device reads, and from its answers back to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.cuda.attention import prefill_tiles
from worker.cuda.gpu_step import bucket_for, context_limit_for
from worker.cuda.sampler import STATUS_WORDS
from worker.cuda.sampling import SamplingBlock, SamplingBuffers
from worker.cuda.step_inputs import DecodeInputs, InputBlock, PrefillInputs
from worker.cuda.values import Sampling, StepShape
from worker.runtime.executor import Output, SampledToken, SequencePart, StepBatch, StepFailed
from worker.runtime.gpu_samplers import SamplerWriter


@dataclass(frozen=True)
class PreparedStep:
    """A step whose inputs lie in pinned memory, those of sampling in the sampling block of the same slot."""

    shape: StepShape
    inputs: InputBlock
    outputs: tuple[Output, ...]


class BatchWriter:
    """Fills the input blocks, those of decode in turn. Rows of a decode bucket that nobody uses write to the scratch
    page.
    """

    def __init__(
        self, decode: DecodeInputs, prefill: PrefillInputs, tile_rows: int, scratch_page: int
    ) -> None:
        self._decode, self._prefill = decode, prefill
        self._tile_rows, self._scratch_pages = tile_rows, (scratch_page,)
        self._slot = 0  # of the next decode step
        self._sampler_writers: dict[InputBlock, SamplerWriter] = {}

    def write(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        """`sampling` None: another part of the machine has the head."""
        if self.fits_bucket(batch):
            return self._write_decode(batch, sampling)
        return self._write_prefill(batch, sampling)

    def forget(self) -> None:
        """A step that was written may not have run."""
        self._decode.forget_tables()

    def fits_bucket(self, batch: StepBatch) -> bool:
        """Whether a decode graph serves the batch."""
        one_each = batch.is_decode and batch.n_outputs == batch.n_tokens
        return one_each and len(batch.parts) <= self._decode.limits.max_sequences

    def _write_decode(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        block, count = self._decode.blocks[self._slot], len(batch.parts)
        self._slot = (self._slot + 1) % len(self._decode.blocks)
        bucket = bucket_for(count)
        assert bucket is not None
        n_positions = 0
        block.begin()
        for row, part in enumerate(batch.parts):
            block.set_row(row, part.token_ids[0], part.first_position, part.page_ids)
            n_positions = max(n_positions, part.first_position + 1)
        for row in range(count, bucket):
            block.set_row(row, 0, 0, self._scratch_pages)
        outputs = tuple(part.outputs[0] for part in batch.parts)
        kind = self._write_samplers(block, outputs, bucket, sampling)
        shape = StepShape(
            n_tokens=bucket,
            n_sequences=bucket,
            n_outputs=bucket,
            context_limit=context_limit_for(n_positions),
            is_decode=True,
            inputs=self._decode.addresses,
            sampling=kind,
            mailbox=block.mailbox,
        )
        return PreparedStep(shape, block, outputs)

    def _write_prefill(self, batch: StepBatch, sampling: SamplingBuffers | None) -> PreparedStep:
        block = self._prefill
        outputs: list[Output] = []
        first = np.zeros(len(batch.parts) + 1, np.int32)
        row = n_positions = 0
        for sequence, part in enumerate(batch.parts):
            end = row + len(part.token_ids)
            _write_part(block, part, row, end, sequence)
            for output in part.outputs:
                block.output_rows[len(outputs)] = row + output.row
                outputs.append(output)
            n_positions = max(n_positions, part.first_position + len(part.token_ids))
            first[sequence + 1] = row = end
        n_tiles = self._write_tiles(block, first)
        kind = self._write_samplers(block, tuple(outputs), len(outputs), sampling)
        shape = StepShape(
            n_tokens=row,
            n_sequences=len(batch.parts),
            n_outputs=len(outputs),
            context_limit=context_limit_for(n_positions),
            is_decode=False,
            inputs=block.addresses,
            n_tiles=n_tiles,
            sampling=kind,
            mailbox=block.mailbox,
        )
        return PreparedStep(shape, block, tuple(outputs))

    def _write_samplers(
        self, block: InputBlock, outputs: tuple[Output, ...], n_rows: int, sampling: SamplingBuffers | None
    ) -> Sampling:
        if sampling is None or not outputs:
            return "none"
        writer = self._sampler_writers.get(block)
        if writer is None:
            writer = self._sampler_writers[block] = SamplerWriter(block, sampling.blocks[block.slot])
        return writer.write(outputs, n_rows)

    def _write_tiles(self, block: PrefillInputs, sequence_first: np.ndarray) -> int:
        tiles = prefill_tiles(sequence_first, block.positions, self._tile_rows)
        block.tiles[: len(tiles)] = tiles
        return len(tiles)


def _write_part(block: PrefillInputs, part: SequencePart, row: int, end: int, sequence: int) -> None:
    block.token_ids[row:end] = part.token_ids
    block.positions[row:end] = np.arange(part.first_position, part.first_position + end - row)
    block.sequence_of_token[row:end] = sequence
    block.page_tables.set(sequence, part.page_ids, part.first_position + end - row)


def read_answers(prepared: PreparedStep, sampling: SamplingBlock) -> list[SampledToken]:
    """One answer per output. Raises StepFailed for logits that cannot be used."""
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
