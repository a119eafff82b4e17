"""That the memory check (scripts/check-kernel-memory) finds a word written beside an array or beside shared memory.

    python -m tests.cuda.test_out_of_bounds AT SHARED_AT FIXED_AT

writes a word of an array of 5, of dynamic shared memory of 9 and of a shared array of 7, where AddressSanitizer ends it
if one lies outside.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.address_sanitizer import environment
from tests.cuda.devices import EmulatedDevice

ROOT = Path(__file__).resolve().parents[2]
WORDS, SHARED_WORDS, FIXED_WORDS = 5, 9, 7


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    variables = environment()
    if variables is None:
        pytest.skip("g++ has no AddressSanitizer")
    return variables


def write(sanitized: dict[str, str], *places: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cuda.test_out_of_bounds", *map(str, places)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | sanitized, capture_output=True, text=True)


def test_what_lies_inside_is_fine(sanitized: dict[str, str]) -> None:
    done = write(sanitized, WORDS - 1, SHARED_WORDS - 1, FIXED_WORDS - 1)
    assert (done.returncode, done.stdout.split()) == (0, ["3", "0", "0", "0", "2"]), done.stderr


@pytest.mark.parametrize(
    "places", [(WORDS, 0, 0), (-1, 0, 0), (0, SHARED_WORDS, 0), (0, -1, 0), (0, 0, FIXED_WORDS)]
)
def test_one_word_outside_is_reported(sanitized: dict[str, str], places: tuple[int, int, int]) -> None:
    done = write(sanitized, *places)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr and "in write_" in done.stderr


def main() -> None:
    device = EmulatedDevice()
    array = device.put(np.zeros(WORDS, np.uint32))
    function = device.launcher.function("out_of_bounds.cu", "write_words")
    arguments = (array, *(ctypes.c_int(int(word)) for word in sys.argv[1:]))
    device.launcher.launch(function, 1, 32, 4 * SHARED_WORDS, arguments)
    print(*device.get(array))


if __name__ == "__main__":
    main()
