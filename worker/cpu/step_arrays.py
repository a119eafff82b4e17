"""The input and output of a step as the C ABI wants them: numpy arrays, and the struct that points at them.

The arrays are made once; filling them and `Step.run(arrays.struct, n_threads)` is all Python does for a token.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.cpu.structs import BatchStruct, SampledStruct, SamplerStruct

GREEDY = {"temperature": 0.0, "top_p": 1.0, "repeat_penalty": 1.0, "n_top": -1}


class StepArrays:
    """Room for max_tokens tokens and max_outputs outputs of max_sequences sequences of max_pages pages.

    Arrays, all int32: `token_ids`, `positions` [max_tokens]; `sequence_first` [max_sequences + 1];
    `page_tables` [max_sequences, max_pages]; `output_rows` [max_outputs]. `samplers` and `sampled` are arrays
    of structs. Set `struct.n_tokens`, `n_sequences` and `n_outputs` before a run. `cancel[0] = 1` ends a
    running step early.
    """

    def __init__(
        self, max_tokens: int, max_sequences: int, max_outputs: int, max_pages: int, sampling: bool = True
    ) -> None:
        self.token_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int32)
        self.sequence_first = np.zeros(max_sequences + 1, np.int32)
        self.page_tables = np.zeros((max_sequences, max_pages), np.int32)
        self.output_rows = np.zeros(max_outputs, np.int32)
        self.cancel = np.zeros(1, np.int32)
        self.samplers = (SamplerStruct * max_outputs)(*[SamplerStruct(**GREEDY) for _ in range(max_outputs)])
        self.sampled = (SampledStruct * max_outputs)()
        self._kept: dict[tuple[int, str], NDArray[Any] | None] = {}
        self.struct = BatchStruct(page_table_stride=max_pages)
        for name in ("token_ids", "positions", "sequence_first", "page_tables", "output_rows", "cancel"):
            setattr(self.struct, name, getattr(self, name).ctypes.data)
        if sampling:
            self.struct.samplers = ctypes.cast(self.samplers, ctypes.POINTER(SamplerStruct))
            self.struct.sampled = ctypes.cast(self.sampled, ctypes.POINTER(SampledStruct))

    def set_logits(self, logits: NDArray[np.float32] | None) -> None:
        """Where the model's logits [max_outputs, n_vocab] are copied to; None for nowhere."""
        self._kept[0, "logits"] = logits
        self.struct.logits = None if logits is None else logits.ctypes.data

    def set_history(self, output: int, history: NDArray[np.int32]) -> None:
        """The tokens that this output's penalties look at: int32, contiguous, kept alive until replaced."""
        self._kept[output, "history"] = history
        self.samplers[output].history = history.ctypes.data
        self.samplers[output].n_history = len(history)

    def set_bias(self, output: int, ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """What is added to the logits of `ids`; both contiguous, kept alive until replaced."""
        self._kept[output, "bias_ids"], self._kept[output, "bias_values"] = ids, values
        sampler = self.samplers[output]
        sampler.bias_ids, sampler.bias_values, sampler.n_bias = ids.ctypes.data, values.ctypes.data, len(ids)
