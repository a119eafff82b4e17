"""Which ops may run inside of another's kernels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cuda.executors import synthetic_model
from worker.cuda.fusion import dense_networks, folded_norms, folded_routers
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.lower import lower
from worker.ops.oplist import Buffer, Op, OpKind, OpList


def lowered(folder: Path, shape: str) -> OpList:
    return lower(archs.units(open_model(synthetic_model(folder, shape))))


def test_every_norm_of_a_dense_model_is_folded(tmp_path: Path) -> None:
    oplist = lowered(tmp_path, "tiny-dense")
    norms = {at for at, op in enumerate(oplist.ops) if op.kind == OpKind.RMS_NORM}
    folded = folded_norms(oplist)
    assert set(folded.values()) == norms
    assert all(oplist.ops[reader].inputs[0] == oplist.ops[norm].outputs[0] for reader, norm in folded.items())
    assert len(dense_networks(oplist)) == 4


def test_a_mixture_folds_its_norm_into_router_and_experts(tmp_path: Path) -> None:
    oplist = lowered(tmp_path, "tiny-moe")
    folded = folded_norms(oplist)
    kinds = [oplist.ops[reader].kind for reader in folded]
    assert kinds.count(OpKind.ROUTER) == kinds.count(OpKind.MOE) == 4
    assert not dense_networks(oplist)


def test_a_router_rides_along_with_the_product_in_front_of_its_norm(tmp_path: Path) -> None:
    oplist = lowered(tmp_path, "tiny-moe")
    routers = [at for at, op in enumerate(oplist.ops) if op.kind == OpKind.ROUTER]
    assert folded_routers(oplist) == {router - 2: router for router in routers}
    biased = replace_op(oplist, routers[1], biases=(0,))
    assert folded_routers(biased) == {router - 2: router for router in routers if router != routers[1]}
    assert not folded_routers(lowered(tmp_path, "tiny-dense"))


def replace_op(oplist: OpList, at: int, **fields: tuple[int, ...]) -> OpList:
    ops = list(oplist.ops)
    ops[at] = msgspec.structs.replace(ops[at], **fields)
    return msgspec.structs.replace(oplist, ops=tuple(ops))


@pytest.mark.parametrize("between", [OpKind.GLU, OpKind.EMBED])
def test_a_norm_is_kept_where_something_else_needs_it(between: OpKind) -> None:
    """Another reader of its output, or a writer of its input in front of the last reader."""
    other = Op(
        between,
        0,
        inputs=(1, 1) if between == OpKind.GLU else (),
        outputs=(3 if between == OpKind.GLU else 0,),
    )
    ops = (
        Op(OpKind.RMS_NORM, 0, inputs=(0,), outputs=(1,), weights=(0,), ints=(0,), floats=(1e-6,)),
        other,
        Op(OpKind.LINEAR, 0, inputs=(1,), outputs=(2,), ints=(1, 0), floats=(0.0, 0.0)),
    )
    buffers = tuple(Buffer(name, 32) for name in "abcd")
    assert not folded_norms(OpList(ops, buffers, (), (), 1))
    assert folded_norms(OpList((ops[0], ops[2]), buffers, (), (), 1)) == {1: 0}
