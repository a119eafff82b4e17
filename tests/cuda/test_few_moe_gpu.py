"""The kernels of mixtures for few tokens on a card, at real widths."""

from __future__ import annotations

import pytest

from tests.cuda import few_moe_checks as checks
from tests.cuda import prefill_checks
from tests.cuda.devices import GpuDevice, why_no_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "-")]


@pytest.fixture(scope="module")
def device() -> GpuDevice:
    return GpuDevice()


@pytest.mark.parametrize("down", ["Q4_K", "Q6_K", "Q8_0", "Q5_0"])
@pytest.mark.parametrize("n_tokens", [2, 4, 7, 16, 32])
def test_experts(device: GpuDevice, down: str, n_tokens: int) -> None:
    checks.check_few_experts(device, ("Q4_K", "Q4_K", down), n_tokens, (2048, 768, 12, 8))


@pytest.mark.parametrize("n_tokens", [2, 8, 31])
def test_many_experts(device: GpuDevice, n_tokens: int) -> None:
    checks.check_few_experts(device, ("Q4_K", "Q5_K", "Q6_K"), n_tokens, (512, 256, 128, 8))
    checks.check_few_experts(device, ("Q4_0", "Q4_0", "Q8_0"), n_tokens, (96, 2080, 40, 3))
    checks.check_few_experts(device, ("Q5_0", "Q8_0", "Q5_1"), n_tokens, (96, 96, 130, 19), is_sigmoid=True)


def test_experts_that_are_given(device: GpuDevice) -> None:
    checks.check_few_experts(device, ("Q2_K", "Q3_K", "Q5_K"), 19, (1024, 512, 24, 5), is_chosen=True)


@pytest.mark.parametrize("n_tokens", [2, 9, 32])
@pytest.mark.parametrize(("name", "cols"), [("F32", 2048), ("F16", 7168), ("BF16", 160)])
def test_norm_and_router(device: GpuDevice, name: str, cols: int, n_tokens: int) -> None:
    checks.check_norm_and_route(device, name, n_tokens, 128, cols)


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_choice_by_itself(device: GpuDevice, is_sigmoid: bool) -> None:
    checks.check_choice(device, 32, 128, 8, is_sigmoid)


def test_experts_too_wide_for_these_kernels(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores take them."""
    monkeypatch.setattr("worker.cuda.linear.takes_few", lambda *_: False)
    for n_tokens in (5, 32):
        names = ("Q4_K", "Q4_K", "Q6_K")
        prefill_checks.check_grouped(device, names, n_tokens, (512, 256, 16, 4), hidden_group=32)
