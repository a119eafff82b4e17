"""Plan files: what is written comes back, every byte counts, nothing unknown is accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from configs.errors import PlanError
from plans.machine import Gpu
from plans.plan import Plan, decode_plan, encode_plan, plan_builtins, plan_id_of
from tests.plans.samples import sample_plan


def test_round_trip() -> None:
    plan = sample_plan()
    data = encode_plan(plan)
    again = decode_plan(data, plan_id_of(data))
    assert msgspec.structs.replace(again, id="") == plan
    assert encode_plan(again) == data


def test_a_plan_of_a_gpu_machine_can_be_read_again() -> None:
    plan = sample_plan()
    here = msgspec.structs.replace(plan.host, gpus=(Gpu("NVIDIA Large", "580.1"),), gpus_absent_reason=None)
    data = encode_plan(msgspec.structs.replace(plan, host=here))
    assert decode_plan(data, plan_id_of(data)).host == here


def structs_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    """Every struct that a value of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for inner in get_type_hints(annotation).values():
            yield from structs_in(inner)
    for argument in get_args(annotation):
        yield from structs_in(argument)


def test_whatever_may_be_unknown_may_be_missing_in_the_file() -> None:
    """TOML has no null: without a default such a field would make the file unreadable."""
    found = set(structs_in(Plan))
    assert len(found) > 10
    for struct in found:
        for field in msgspec.structs.fields(struct):
            if type(None) in get_args(get_type_hints(struct)[field.name]):
                assert not field.required and field.default is None, f"{struct.__name__}.{field.name}"


def test_unknown_is_absent_and_never_zero() -> None:
    content = tomllib.loads(encode_plan(sample_plan()).decode())
    row = content["evidence"]["candidates"][0]
    assert "predicted_s" not in row and "load_s" not in row
    assert "id" not in content


def test_json_has_the_id_first() -> None:
    plan = msgspec.structs.replace(sample_plan(), id="0" * 20)
    assert next(iter(plan_builtins(plan))) == "id"
    assert "id" not in plan_builtins(sample_plan())


def test_one_changed_byte_is_noticed_wherever_it_is() -> None:
    data = encode_plan(sample_plan())
    plan_id = plan_id_of(data)
    for position in range(0, len(data), 37):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(PlanError, match="damaged"):
            decode_plan(bytes(changed), plan_id)
    with pytest.raises(PlanError, match="damaged"):
        decode_plan(data + b"\n", plan_id)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"format_version = 99\n", "format version 99"),
        (b"format_version = 1\n", "not readable"),
        (b"= nonsense", "not readable"),
        (b"\xff\xfe", "not readable"),
    ],
)
def test_files_that_are_no_plan_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        decode_plan(data, plan_id_of(data))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('engine = "native"', "no build of its engine, other"),
        ('device = "cpu"', "other GPUs in its placement than in its memory"),
    ],
)
def test_parts_that_do_not_belong_together_are_no_plan(field: str, words: str) -> None:
    text = encode_plan(sample_plan()).decode()
    assert field in text
    name = field.split(" ")[0]
    data = text.replace(field, f'{name} = "{"other" if name == "engine" else "gpu0"}"', 1).encode()
    with pytest.raises(PlanError, match=f"not readable.*{words}"):
        decode_plan(data, plan_id_of(data))


def test_unknown_fields_are_refused() -> None:
    data = b"surprise = 1\n" + encode_plan(sample_plan())
    with pytest.raises(PlanError, match="surprise"):
        decode_plan(data, plan_id_of(data))
