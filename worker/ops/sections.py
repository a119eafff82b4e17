"""Cutting an op list by device: contiguous sections that hand the residual stream to each other.

Whole layers are placed, with the embedding and the head as layers of their own. What travels between two sections is
the residual, f32 [n_tokens, n_embd], and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from configs.errors import PlanError
from plans.placement import Placement
from plans.units import Unit
from worker.ops.oplist import AttentionInts, Op, OpKind, OpList, RopeStoreInts

RESIDUAL = "residual"


@dataclass(frozen=True)
class Section:
    """Ops [begin, end) of the whole list, all on `device`."""

    device: str
    begin: int
    end: int


def device_of(unit_name: str, placement: Placement) -> str:
    """Where a unit computes: the last assignment that matches. Raises PlanError where none does."""
    device = None
    for assignment in placement.assignments:
        if fnmatchcase(unit_name, assignment.units):
            device = assignment.device
    if device is None:
        raise PlanError(f"the placement says nothing about unit {unit_name}; run `placewright plan` again")
    return device


def cut(oplist: OpList, units: tuple[Unit, ...], placement: Placement) -> tuple[Section, ...]:
    """Sections in order. Raises PlanError for a layer that is split between devices."""
    devices = _layer_devices(units, placement)
    sections: list[Section] = []
    for index, op in enumerate(oplist.ops):
        device = devices[_place_of(op)]
        if sections and sections[-1].device == device:
            sections[-1] = Section(device, sections[-1].begin, index + 1)
        else:
            sections.append(Section(device, index, index + 1))
    return tuple(sections)


def _place_of(op: Op) -> str:
    if op.layer >= 0:
        return str(op.layer)
    return "embedding" if op.kind == OpKind.EMBED else "head"


def _layer_devices(units: tuple[Unit, ...], placement: Placement) -> dict[str, str]:
    devices: dict[str, str] = {}
    for unit in units:
        place = str(unit.layer) if unit.layer >= 0 else unit.kind
        device = device_of(unit.name, placement)
        if devices.setdefault(place, device) != device:
            raise PlanError(
                f"layer {unit.layer} is split between {devices[place]} and {device} ({unit.name}); this version places "
                "whole layers, run `placewright plan` again"
            )
    return devices


def restrict(oplist: OpList, ops: tuple[Op, ...]) -> OpList:
    """A list of these ops alone, with only the buffers, weights and KV layers they use, numbered anew."""
    buffers = _Renumbering(index for op in ops for index in (*op.inputs, *op.outputs))
    weights = _Renumbering(index for op in ops for index in (*op.weights, *op.biases))
    kv_layers = _Renumbering(_CACHE_INTS[op.kind](*op.ints).kv_layer for op in ops if op.kind in _CACHE_INTS)
    renumbered = tuple(_renumber(op, buffers, weights, kv_layers) for op in ops)
    return OpList(
        renumbered,
        tuple(oplist.buffers[index] for index in buffers.kept),
        tuple(oplist.weights[index] for index in weights.kept),
        tuple(oplist.kv_layers[index] for index in kv_layers.kept),
        oplist.n_vocab,
    )


# of the ops that write or read the KV cache
_CACHE_INTS: dict[OpKind, type[RopeStoreInts | AttentionInts]] = {
    OpKind.ROPE_STORE: RopeStoreInts,
    OpKind.ATTENTION: AttentionInts,
}


class _Renumbering:
    """Old numbers to new ones, in the old order; -1 stays."""

    def __init__(self, used: Iterable[int]) -> None:
        self.kept = sorted({index for index in used if index >= 0})
        self._new = {old: new for new, old in enumerate(self.kept)} | {-1: -1}

    def __call__(self, index: int) -> int:
        return self._new[index]


def _renumber(
    op: Op, buffers: Callable[[int], int], weights: Callable[[int], int], kv_layers: Callable[[int], int]
) -> Op:
    ints = op.ints
    if op.kind in _CACHE_INTS:
        named = _CACHE_INTS[op.kind](*ints)
        ints = named._replace(kv_layer=kv_layers(named.kv_layer))
    return Op(
        op.kind,
        op.layer,
        tuple(map(buffers, op.inputs)),
        tuple(map(buffers, op.outputs)),
        tuple(map(weights, op.weights)),
        tuple(map(weights, op.biases)),
        ints,
        op.floats,
    )
