"""Rotary frequencies: plain, with factors, linear and YaRN, against formulas written out another way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ModelFileError
from worker.model import rope
from worker.model.metadata import Metadata, MetadataValue


def metadata(**values: MetadataValue) -> Metadata:
    keys = {f"m.rope.{name.replace('scaling_', 'scaling.', 1)}": value for name, value in values.items()}
    return Metadata(Path("model.gguf"), {"m.context_length": 4096, **keys})


def test_plain_and_factors() -> None:
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    found = rope.from_metadata(metadata(freq_base=500000.0), "m", 8, factors)
    expected = [500000 ** (-i / 4) / factor for i, factor in enumerate(factors)]
    assert found.inverse_frequencies == pytest.approx(expected) and found.magnitude == 1.0


@pytest.mark.parametrize("keys", [{"scaling_type": "linear", "scaling_factor": 4.0}, {"scale_linear": 4.0}])
def test_linear_scaling_divides_every_frequency(keys: dict[str, MetadataValue]) -> None:
    found = rope.from_metadata(metadata(**keys), "m", 8)
    assert found.inverse_frequencies == pytest.approx([10000 ** (-i / 4) / 4 for i in range(4)])


def test_scaling_none_ignores_the_factor() -> None:
    found = rope.from_metadata(metadata(scaling_type="none", scaling_factor=4.0), "m", 8)
    assert found.inverse_frequencies[0] == 1.0


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    keys: dict[str, MetadataValue] = {
        "scaling_type": "yarn",
        "scaling_factor": 4.0,
        "scaling_original_context_length": 32768,
        "freq_base": 1e6,
    }
    found = rope.from_metadata(metadata(**keys), "m", 128)
    plain = rope.plain(128, 1e6).inverse_frequencies
    ratios = [scaled / unscaled for scaled, unscaled in zip(found.inverse_frequencies, plain, strict=True)]
    # pairs that turn more than 32 times in the original context stay, those below one turn are divided by 4
    turns = [32768 * frequency / (2 * math.pi) for frequency in plain]
    first_slow = next(i for i, count in enumerate(turns) if count < 32)
    last_fast = next(i for i, count in enumerate(turns) if count < 1)
    assert ratios[: first_slow - 1] == [1.0] * (first_slow - 1)
    assert ratios[last_fast:] == pytest.approx([0.25] * (64 - last_fast))
    assert ratios == sorted(ratios, reverse=True)
    assert found.magnitude == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scaling_type": "ntk"}, "m.rope.scaling.type = 'ntk', expected one of none, linear, yarn"),
        ({"scaling_type": "yarn", "scaling_yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5, expected 1"),
        ({"scaling_type": "yarn", "freq_base": 1.0}, "freq_base = 1.0, expected more than 1"),
        ({"freq_base": float("nan")}, "freq_base = nan"),
        ({"scaling_factor": -2.0}, "scaling.factor = -2.0"),
    ],
)
def test_scaling_that_is_not_known_is_refused(keys: dict[str, MetadataValue], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        rope.from_metadata(metadata(**keys), "m", 8)


def test_factors_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ModelFileError, match="rope_freqs.weight holds factors that are not positive"):
        rope.from_metadata(metadata(), "m", 8, np.array([1, 0, 1, 1], np.float32))
