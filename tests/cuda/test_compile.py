"""Every kernel variant compiles for every architecture; no GPU needed, only NVRTC."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.cuda.loader import SOURCES, cubin, spliced
from worker.cuda.nvrtc import CompileError, Nvrtc, load_nvrtc
from worker.cuda.variants import ARCHITECTURES, FAMILIES, Variant, all_variants


@pytest.fixture
def nvrtc() -> Nvrtc:
    found = load_nvrtc()
    if found is None:
        pytest.skip("no NVRTC on this machine: install nvidia-cuda-nvrtc")
    return found


def compile_variant(nvrtc: Nvrtc, variant: Variant, architecture: int) -> bytes:
    """Hasty code takes a third of the time, where the compiler has the option; it does not manage every kernel."""
    if nvrtc.version >= (13, 0):
        with contextlib.suppress(CompileError):
            return cubin(*variant, architecture, nvrtc, ("--Ofast-compile=max",))
    return cubin(*variant, architecture, nvrtc)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles(nvrtc: Nvrtc, architecture: int, family: str) -> None:
    if architecture not in nvrtc.architectures:
        pytest.skip(f"NVRTC {nvrtc.version} does not know sm_{architecture}")

    def failure(variant: Variant) -> str | None:
        try:
            assert compile_variant(nvrtc, variant, architecture)
        except CompileError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [text for text in pool.map(failure, FAMILIES[family]()) if text]
    assert not failures, "\n".join(failures)


def test_every_source_is_a_variant() -> None:
    assert {path.name for path in SOURCES.glob("*.cu")} == {source for source, _ in all_variants()}


def test_an_error_names_file_and_variant(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("worker.cuda.loader.SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "low.cuh").write_text("\n\nint broken = ;\n")
    (tmp_path / "top.cu").write_text('#include "low.cuh"\nextern "C" __global__ void f() {}\n')
    with pytest.raises(CompileError, match=r"top.cu does not compile.*-DWIDTH=3[\s\S]*low.cuh"):
        cubin("top.cu", {"WIDTH": 3}, nvrtc.architectures[0], nvrtc)


def test_includes_are_spliced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("worker.cuda.loader.SOURCES", tmp_path)
    (tmp_path / "a.cuh").write_text("int a;\n")
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\nint b;\n')
    (tmp_path / "top.cu").write_text('#include "b.cuh"\n#include "a.cuh"\nint top;\n')
    text = spliced("top.cu")
    assert (text.count("int a;"), text.count("int b;")) == (1, 1)
    assert text.index("int a;") < text.index("int b;") < text.index("int top;")


def test_the_cache_is_used_and_sees_edits(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("worker.cuda.loader.SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.cu").write_text('extern "C" __global__ void f(int* x) { *x = 1; }\n')
    first = cubin("one.cu", {}, nvrtc.architectures[0], nvrtc)
    monkeypatch.setattr(Nvrtc, "compile", lambda *_: b"compiled again")
    assert cubin("one.cu", {}, nvrtc.architectures[0], nvrtc) == first
    (tmp_path / "one.cu").write_text('extern "C" __global__ void f(int* x) { *x = 2; }\n')
    assert cubin("one.cu", {}, nvrtc.architectures[0], nvrtc) == b"compiled again"
