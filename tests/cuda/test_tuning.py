"""Start-up tuning: which way of each kernel it keeps, on a graph whose time is a function of the choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from worker.cuda import tuning


class Kernel:
    def __init__(self, name: str, hesitant: bool = False) -> None:
        self.name, self.hesitant = name, hesitant
        self.may_start_early: bool | None = None
        self.alone = False


class Recorder:
    """A launcher as far as tuning looks at it."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        self.early_functions: dict[Kernel, bool] | None = None

    def enqueue(self) -> None:
        if self.early_functions is not None:
            self.early_functions |= {kernel: not kernel.hesitant for kernel in self.kernels}


class Idle:
    def synchronize(self) -> None: ...


def tuned(
    monkeypatch: pytest.MonkeyPatch, kernels: list[Kernel], seconds: Callable[[], float]
) -> tuple[float, list[float]]:
    """Seconds of the tuned graph, and all that were measured."""
    seen: list[float] = []

    def measured(*_: object) -> float:
        seen.append(seconds())
        return seen[-1]

    monkeypatch.setattr(tuning, "graph_s", measured)
    launcher = Recorder(kernels)
    return tuning.tune_placement(Idle(), launcher, launcher.enqueue), seen  # type: ignore[arg-type]


def test_the_faster_way_of_each_kernel_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    late, apart, as_is = Kernel("late"), Kernel("apart"), Kernel("as is")
    hesitant = Kernel("hesitant", hesitant=True)

    def seconds() -> float:
        penalty = bool(late.may_start_early) + (not apart.alone) + (not hesitant.may_start_early)
        return 1.0 + 0.1 * penalty + 0.1 * (as_is.alone or not as_is.may_start_early)

    best_s, _ = tuned(monkeypatch, [late, apart, as_is, hesitant], seconds)
    assert best_s == pytest.approx(1.0)
    assert [k.may_start_early for k in (late, apart, as_is, hesitant)] == [False, True, True, True]
    assert [k.alone for k in (late, apart, as_is, hesitant)] == [False, True, False, False]


def test_a_gain_within_the_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("kernel")
    best_s, seen = tuned(
        monkeypatch, [kernel], lambda: 1.0 - 0.001 * (kernel.alone + (not kernel.may_start_early))
    )
    assert (best_s, kernel.may_start_early, kernel.alone) == (1.0, True, False)
    assert len(seen) == 3  # nothing helped, so there is no second pass


def test_what_pays_only_after_another_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Kernel("first"), Kernel("second")

    def seconds() -> float:
        return 1.0 - 0.1 * second.alone - 0.1 * (second.alone and not first.may_start_early)

    best_s, _ = tuned(monkeypatch, [first, second], seconds)
    assert best_s == pytest.approx(0.8)
    assert (first.may_start_early, second.alone) == (False, True)
