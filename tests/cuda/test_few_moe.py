"""The kernels of mixtures for few tokens in the emulator: indices and arithmetic, on a machine without a GPU."""

from __future__ import annotations

import pytest

from tests.cuda import few_moe_checks as checks
from tests.cuda import prefill_checks
from tests.cuda.devices import EmulatedDevice, why_no_emulator

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator() or "-")


@pytest.fixture(scope="module")
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.mark.parametrize("n_tokens", [3, 12])
def test_experts(device: EmulatedDevice, n_tokens: int) -> None:
    checks.check_few_experts(device, ("Q4_0", "Q4_0", "Q8_0"), n_tokens, (96, 64, 8, 3))


def test_experts_that_are_given(device: EmulatedDevice) -> None:
    checks.check_few_experts(device, ("Q4_K", "Q5_K", "Q6_K"), 19, (256, 256, 12, 5), is_chosen=True)


def test_many_experts_of_a_token(device: EmulatedDevice) -> None:
    """More than half a warp of them, chosen with a bias."""
    checks.check_few_experts(device, ("Q5_0", "Q8_0", "Q5_1"), 9, (96, 96, 130, 19), is_sigmoid=True)


@pytest.mark.parametrize(("name", "n_tokens", "cols"), [("F32", 3, 96), ("F16", 9, 2304), ("BF16", 19, 160)])
def test_norm_and_router(device: EmulatedDevice, name: str, n_tokens: int, cols: int) -> None:
    checks.check_norm_and_route(device, name, n_tokens, 11, cols)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_choice_by_itself(device: EmulatedDevice, is_sigmoid: bool) -> None:
    checks.check_choice(device, 5, 40, 6, is_sigmoid)


def test_experts_too_wide_for_these_kernels(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores take them."""
    monkeypatch.setattr("worker.cuda.linear.takes_few", lambda *_: False)
    prefill_checks.check_grouped(device, ("Q4_0", "Q4_0", "Q8_0"), 7, (96, 96, 4, 2), hidden_group=32)
    prefill_checks.check_grouped(device, ("Q4_0", "Q4_0", "Q8_0"), 20, (96, 96, 16, 2), hidden_group=32)
