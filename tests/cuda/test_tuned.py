"""What tuning found, on disk: it is found again for the same kernels, model and card, and for nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cuda.executors import synthetic_model
from worker.cuda.tuned import Settings, apply_settings, load_settings, store_settings, tuned_file
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.lower import lower
from worker.ops.oplist import OpList


@dataclass(eq=False)
class Kernel:
    """What is asked of a driver's Function."""

    TUNED = ("may_start_early",)

    identity: str
    may_start_early: bool = True


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def oplist_of(folder: Path, shape: str) -> OpList:
    return lower(archs.units(open_model(synthetic_model(folder, shape))))


def test_settings_are_found_again(tmp_path: Path) -> None:
    oplist = oplist_of(tmp_path, "tiny-dense")
    tuned = [Kernel("a 1", False), Kernel("b 2", True)]
    file = tuned_file("card 13000", oplist, tuned)  # type: ignore[arg-type]
    assert load_settings(file) is None
    store_settings(file, tuned, 1e-3)  # type: ignore[arg-type]
    fresh = [Kernel("a 1"), Kernel("b 2")]
    known = load_settings(tuned_file("card 13000", oplist, fresh))  # type: ignore[arg-type]
    assert known is not None and apply_settings(fresh, known)  # type: ignore[arg-type]
    assert [kernel.may_start_early for kernel in fresh] == [False, True]
    assert known.is_confirmed_by(1.05e-3) and not known.is_confirmed_by(1.2e-3)
    assert not known.is_confirmed_by(0.8e-3), "then it was slow for another reason when it was tuned"


def test_another_card_driver_kernel_or_model_is_tuned_anew(tmp_path: Path) -> None:
    dense, moe = (oplist_of(tmp_path, shape) for shape in ("tiny-dense", "tiny-moe"))
    kernels = [Kernel("a 1"), Kernel("b 2")]
    files = {
        tuned_file("card 13000", dense, kernels),  # type: ignore[arg-type]
        tuned_file("card 13010", dense, kernels),  # type: ignore[arg-type]
        tuned_file("other 13000", dense, kernels),  # type: ignore[arg-type]
        tuned_file("card 13000", moe, kernels),  # type: ignore[arg-type]
        tuned_file("card 13000", dense, [Kernel("a 1"), Kernel("b 3")]),  # type: ignore[list-item]
    }
    assert len(files) == 5


def test_a_broken_or_foreign_file_is_no_answer(tmp_path: Path) -> None:
    file = tuned_file("card", oplist_of(tmp_path, "tiny-dense"), [])
    file.parent.mkdir(parents=True)
    for text in ("", "[1]", "{", "{}"):
        file.write_text(text)
        assert load_settings(file) is None
    kernel = Kernel("a 1")
    for attributes in ({"b 2": {"may_start_early": False}}, {"a 1": {"another": False}}):
        settings = Settings(1e-3, attributes)  # type: ignore[arg-type]
        assert not apply_settings([kernel], settings) and kernel.may_start_early  # type: ignore[list-item]
