"""How the outputs of a step choose their tokens, as the records and pools that the device's sampler reads."""

from __future__ import annotations

from worker.cuda.sampling import MOST_BIASES, SamplingBlock
from worker.cuda.step_inputs import InputBlock
from worker.cuda.values import Sampling
from worker.runtime.executor import Output, Sampler, StepFailed

NO_TARGET = -1
_GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
_SETTINGS = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SamplerWriter:
    """Fills the sampler records of one input block and the pools of the sampling block of its slot.

    From step to step of a stream only the number of the draw and the history change, so settings are written once.
    """

    def __init__(self, block: InputBlock, pools: SamplingBlock) -> None:
        self._records, self._pools = block.samplers, pools
        self._known: list[Sampler | None] = []  # whose settings the first records hold; None holds a target
        self._n_padded = 0
        self._n_histories = 0  # the first so many records may name a history

    def write(self, outputs: tuple[Output, ...], n_rows: int) -> Sampling:
        """Records of the outputs, greedy ones up to `n_rows`. Raises StepFailed when a pool is full."""
        if all(_is_plain_greedy(output) for output in outputs):
            return "greedy"
        samplers = [output.sampler for output in outputs]
        if samplers != self._known or n_rows != self._n_padded or None in samplers:
            self._known = []  # in case of an error
            n_biases = self._write_settings(outputs, n_rows)
            if not n_biases:  # the pool is not this writer's alone
                self._known, self._n_padded = samplers, n_rows
        self._records["draw"][: len(outputs)] = [output.draw for output in outputs]
        self._write_histories(outputs)
        return "full"

    def _write_settings(self, outputs: tuple[Output, ...], n_rows: int) -> int:
        """Everything but draws and histories; returns how many biases there are."""
        n_biases = 0
        for row, output in enumerate(outputs):
            record, sampler = self._records[row], output.sampler or _GREEDY
            for name in _SETTINGS:
                record[name] = getattr(sampler, name)
            has_target = output.target is not None
            record["target"] = output.target if has_target else NO_TARGET
            record["n_top"] = output.top if has_target else sampler.top
            end = n_biases + len(sampler.bias_ids)
            if end > MOST_BIASES:
                raise StepFailed(f"the step has {end} biased tokens, the GPU's pool holds {MOST_BIASES}")
            self._pools.bias_ids[n_biases:end] = sampler.bias_ids
            self._pools.bias_values[n_biases:end] = sampler.bias_values
            record["first_bias"], record["n_bias"] = n_biases, len(sampler.bias_ids)
            n_biases = end
        self._pad(len(outputs), n_rows)
        return n_biases

    def _pad(self, begin: int, end: int) -> None:
        for record in self._records[begin:end]:
            for name in _SETTINGS:
                record[name] = getattr(_GREEDY, name)
            record["target"], record["n_top"] = NO_TARGET, _GREEDY.top
            record["draw"] = record["n_history"] = record["n_bias"] = 0

    def _write_histories(self, outputs: tuple[Output, ...]) -> None:
        if not self._n_histories and not any(output.history for output in outputs):
            return
        pool, n_history = self._pools.history, 0
        for row, output in enumerate(outputs):
            record, end = self._records[row], n_history + len(output.history)
            if end > len(pool):
                raise StepFailed(f"the step has {end} penalised tokens, the GPU's pool holds {len(pool)}")
            pool[n_history:end] = output.history
            record["first_history"], record["n_history"] = n_history, len(output.history)
            n_history = end
        if n_history:
            self._n_histories = max(self._n_histories, len(outputs))
        elif len(outputs) >= self._n_histories:
            self._n_histories = 0


def _is_plain_greedy(output: Output) -> bool:
    sampler = output.sampler
    return (
        sampler is not None
        and sampler.temperature <= 0
        and sampler.top < 0
        and not sampler.bias_ids
        and not output.history
    )
