"""Loading the library, and what it refuses: wrong libraries, op lists that do not fit, batches out of bounds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.errors import EngineError, EngineStartError, RequestFailedError
from plans import host
from tests.cpu.steps import Case, batch_of
from worker.cpu import structs
from worker.cpu.handles import Team
from worker.cpu.library import Library, load_library
from worker.cpu.step_arrays import StepArrays
from worker.ops.oplist import KvLayer, Op, OpKind


def test_a_missing_or_broken_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="cannot be loaded"):
        load_library(tmp_path / "nothing.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(EngineStartError, match="broken.so"):
        load_library(broken)


def test_another_library_is_refused(library: Library) -> None:
    other = Path(np._core._multiarray_umath.__file__)
    with pytest.raises(EngineStartError, match="lacks pw_isa"):
        load_library(other)


def test_version_and_struct_sizes_are_checked(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(EngineStartError, match="ABI version 1"):
        patch.setattr("worker.cpu.library.ABI_VERSION", 2)
        load_library(library.path)

    class Longer(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int32 * 100)]

    with (
        monkeypatch.context() as patch,
        pytest.raises(EngineStartError, match="pw_op has 120 bytes.*400 here"),
    ):
        patch.setitem(structs.STRUCTS, "pw_op", Longer)
        load_library(library.path)


def test_the_level_is_the_one_that_the_cpus_flags_say(library: Library) -> None:
    """The worker says hello, and doctor looks, before the library is loaded."""
    assert host.kernel_level(host.read_cpu().flags) == library.isa


def test_levels_types_and_sizes(library: Library) -> None:
    with pytest.raises(EngineError, match="mmx"):
        library.set_isa("mmx")
    assert library.type_supported(0)
    assert not library.type_supported(999)
    assert library.file_bytes(0, 3, 5) == 60
    with pytest.raises(EngineStartError, match="type 999"):
        library.packed_bytes(999, 16, 32)


def layer(library: Library, rng: np.random.Generator) -> Case:
    """One op of most kinds that fit together; tests then break one of them."""
    case = Case(library, rng, kv_layers=[KvLayer(1, 16)], n_vocab=24)
    x = case.given(rng.standard_normal((8, 32), np.float32))
    q, k, v = case.buffer(32), case.buffer(16), case.buffer(16)
    out, ids, weights = case.buffer(32), case.buffer(2), case.buffer(2)
    chosen, logits = case.buffer(32, is_output=True), case.buffer(24, is_output=True)
    matrices = tuple(case.matrix(rows, 32) for rows in (32, 16, 16))
    case.add(
        OpKind.LINEAR,
        inputs=(x,),
        outputs=(q, k, v),
        weights=matrices,
        biases=(-1, -1, -1),
        ints=(3, 0),
        floats=(0.0, 0.0),
    )
    frequencies = case.vector(np.ones(8, np.float32))
    case.add(
        OpKind.ROPE_STORE,
        inputs=(q, k, v),
        weights=(-1, -1, frequencies),
        ints=(2, 1, 16, 16, 0, 0),
        floats=(0, 1),
    )
    case.add(OpKind.ATTENTION, inputs=(q,), outputs=(out,), ints=(2, 1, 16, 0, 0, 0, 0), floats=(0.25, 0.0))
    norm = case.vector(np.ones(32, np.float32))
    case.add(OpKind.RMS_NORM, inputs=(out,), outputs=(out,), weights=(norm,), ints=(0,), floats=(1e-5,))
    case.add(
        OpKind.ROUTER,
        inputs=(out,),
        outputs=(ids, weights),
        weights=(case.matrix(4, 32),),
        biases=(-1,),
        ints=(4, 2, 0, 1),
        floats=(1.0,),
    )
    stacks = tuple(case.matrix(32, 32, experts=4) for _ in range(3))
    case.add(OpKind.MOE, inputs=(out, ids, weights), outputs=(x,), weights=stacks, ints=(0, 2, 1))
    case.add(OpKind.SELECT, inputs=(x,), outputs=(chosen,))
    head = case.matrix(24, 32)
    case.add(
        OpKind.LINEAR,
        inputs=(chosen,),
        outputs=(logits,),
        weights=(head,),
        biases=(-1,),
        ints=(1, 0),
        floats=(0, 0),
    )
    case.add(OpKind.SAMPLE, inputs=(logits,), ints=(24,))
    return case


BREAKS: list[tuple[OpKind, dict[str, tuple], str]] = [
    (OpKind.EMBED, {"weights": (99,)}, "weight0 is weight 99"),
    (OpKind.EMBED, {"outputs": (5,)}, "width 2, needs 32"),
    (OpKind.LINEAR, {"ints": (4, 0)}, "4 outputs"),
    (OpKind.LINEAR, {"inputs": (99,)}, "buffer 99"),
    (OpKind.LINEAR, {"inputs": (2,)}, "width 16, needs 32"),
    (OpKind.LINEAR, {"outputs": (0, 2, 3)}, "out 0 is the input"),
    (OpKind.LINEAR, {"outputs": (1, 2, 4)}, "width 32, needs 16"),
    (OpKind.LINEAR, {"outputs": (7, 2, 3)}, "differ in their rows"),
    (OpKind.ROPE_STORE, {"ints": (3, 2, 16, 16, 0, 0)}, "3 heads on 2"),
    (OpKind.ROPE_STORE, {"ints": (2, 1, 16, 16, 0, 1)}, "KV layer 1"),
    (OpKind.ROPE_STORE, {"ints": (2, 1, 16, 18, 0, 0)}, "rope_dim 18"),
    (OpKind.ROPE_STORE, {"ints": (2, 1, 16, 16, 2, 0)}, "rope style 2"),
    (OpKind.ROPE_STORE, {"weights": (-1, -1, -1)}, "frequencies"),
    (OpKind.ATTENTION, {"outputs": (1,)}, "two buffers"),
    (OpKind.ATTENTION, {"ints": (1, 1, 32, 0, 0, 0, 0)}, "the cache has 1 of 16"),
    (OpKind.ATTENTION, {"ints": (2, 1, 16, 0, 0, 0, -1)}, "window"),
    (OpKind.RMS_NORM, {"weights": (0,)}, "needs 32"),
    (OpKind.ROUTER, {"ints": (4, 5, 0, 1)}, "5 of 4 experts"),
    (OpKind.ROUTER, {"ints": (4, 2, 2, 1)}, "gating 2"),
    (OpKind.MOE, {"ints": (2, 2, 1)}, "activation 2"),
    (OpKind.MOE, {"inputs": (4, 1, 6)}, "width 32, needs 2"),
    (OpKind.SELECT, {"outputs": (4,)}, "row per output"),
    (OpKind.SAMPLE, {"ints": (25,)}, "needs 25"),
]


def test_the_whole_layer_runs(library: Library, level: str, team: Team, rng: np.random.Generator) -> None:
    case = layer(library, rng)
    batch, native = batch_of([([0, 1, 2], 0, [1]), ([3], 0, [0])])
    expected = case.reference(2).run(batch)
    logits = np.zeros_like(expected)
    native.set_logits(logits)
    assert case.step(team, case.kv(2)).run(native.struct, 2)
    np.testing.assert_allclose(logits, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "change", "words"), BREAKS, ids=lambda value: str(value))
def test_op_lists_that_do_not_fit_are_refused(
    library: Library, team: Team, rng: np.random.Generator, kind: OpKind, change: dict[str, tuple], words: str
) -> None:
    case = layer(library, rng)
    index = next(i for i, op in enumerate(case.ops) if op.kind == kind)
    fields = {name: getattr(case.ops[index], name) for name in Op.__struct_fields__}
    case.ops[index] = Op(**{**fields, **change})
    with pytest.raises(EngineStartError, match=words) as error:
        case.step(team, case.kv(2))
    assert f"op {index} ({kind.name}" in str(error.value)


def test_steps_without_what_they_need_are_refused(
    library: Library, team: Team, rng: np.random.Generator
) -> None:
    case = layer(library, rng)
    with pytest.raises(EngineStartError, match="no key/value cache"):
        case.step(team, None)
    with pytest.raises(EngineStartError, match="at least one"):
        case.step(team, case.kv(2), max_tokens=0)
    case.ops[0] = Op(99, 0)  # type: ignore[arg-type]
    with pytest.raises(EngineStartError, match="unknown kind 99"):
        case.step(team, case.kv(2))


def _set(name: str, index: int | tuple[int, int], value: int) -> Callable[[StepArrays], None]:
    def change(batch: StepArrays) -> None:
        getattr(batch, name)[index] = value

    return change


def _set_struct(name: str, value: int | None) -> Callable[[StepArrays], None]:
    return lambda batch: setattr(batch.struct, name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("token_ids", 1, 8), "token id 8"),
        (_set("token_ids", 1, -1), "token id -1"),
        (_set("positions", 1, 0), "ascend by 1"),
        (_set("positions", 3, -1), "start at 0 or above"),
        (_set("positions", 3, 10000), "table holds 1"),
        (_set("sequence_first", 1, 0), "sequence 0 has tokens"),
        (_set("sequence_first", 2, 3), "must cover"),
        (_set("page_tables", (0, 0), 2), "page 2"),
        (_set("page_tables", (1, 0), -1), "page -1"),
        (_set("output_rows", 0, 4), "row 4 of 4"),
        (_set_struct("n_tokens", 0), "0 tokens"),
        (_set_struct("n_tokens", 65), "65 tokens"),
        (_set_struct("n_outputs", 65), "65 outputs"),
        (_set_struct("n_sequences", 5), "5 sequences"),
        (_set_struct("positions", None), "pointer"),
        (_set_struct("page_tables", None), "pointer"),
    ],
)
def test_batches_out_of_bounds_are_refused(
    library: Library, team: Team, rng: np.random.Generator, change: Callable[[StepArrays], None], words: str
) -> None:
    case = layer(library, rng)
    step = case.step(team, case.kv(2))
    _, native = batch_of([([0, 1, 2], 0, [1]), ([3], 0, [0])])
    change(native)
    with pytest.raises(RequestFailedError, match=words):
        step.run(native.struct, 1)


def test_no_outputs_and_no_samplers(library: Library, team: Team, rng: np.random.Generator) -> None:
    case = layer(library, rng)
    step = case.step(team, case.kv(2))
    _, native = batch_of([([0, 1], 0, [1])], outputs=[])
    assert step.run(native.struct, 2)
    _, native = batch_of([([2], 2, [1])])
    native.struct.samplers = None
    native.struct.sampled = None
    assert step.run(native.struct, 2)
