"""The plan: a placement, the evidence it was chosen on and the key it is valid for. Written once, never changed.

A plan file is TOML and its id is the beginning of the SHA-256 of the file's bytes, so `sha256sum FILE` checks
it by hand and one changed byte is noticed. None is written by leaving the field out.
"""

from __future__ import annotations

import hashlib
import tomllib
from typing import Any, Literal

import msgspec
import tomli_w

from configs.errors import PlanError
from plans.machine import Host, ReadRate
from plans.placement import KvType, LoadMode, Placement

FORMAT_VERSION = 1
ID_DIGITS = 20

Stage = Literal["engine", "memory", "cost", "measure", "confirm"]


class FileIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    bytes: int
    sha256: str


class EngineBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes an engine this engine. `sha256`: of its sources and binaries; None behind a URL."""

    name: str
    version: str
    sha256: str | None = None
    executable: str | None = None


class RequestMix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request that a score is stated for: so many new prompt tokens, so many tokens out."""

    prompt_tokens: int
    output_tokens: int


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan has to serve. `concurrency`: sequences at a time, each of `context_length_tokens`."""

    context_length_tokens: int
    concurrency: int
    kv_types: tuple[KvType, ...]
    mix: RequestMix
    prompts: str = "built-in"  # where the measured prompts come from
    prompts_sha256: str = ""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Caps and pins of the user. They constrain the search; None and () leave it free."""

    engines: tuple[str, ...] = ()
    threads: int | None = None
    ubatch_tokens: int | None = None
    load_mode: LoadMode | None = None
    gpu_memory_mib: int | None = None
    host_memory_mib: int | None = None
    host_memory_margin_mib: int = 1024  # left to the rest of the machine
    allow_storage_streaming: bool = False


class PlanKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan holds for. `digest` names the key: plans of one digest answer the same question."""

    digest: str
    model_files: tuple[FileIdentity, ...]
    machine_fingerprint: str
    engine_builds: tuple[EngineBuild, ...]
    workload: Workload
    limits: Limits


class MemoryNeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes of one tier that a placement takes. The weights of "mmap" are page cache.

    `context_bytes`: what a GPU's driver takes for the process and its graphs.
    """

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    context_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes + self.context_bytes


Split = Literal[
    "train", "heldout"
]  # candidates race on the one half of the prompts, and are confirmed on the other


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One timed run of one prompt set. Times are the client's wall clock; the first token belongs to the prefill.

    `forced`: the output ids were given, so every engine did the same work.
    """

    candidate: str
    round: int
    split: Split
    prompt: str
    prompt_tokens: int
    output_tokens: int
    cold: bool
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    forced: bool = False


class CandidateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finalist. `score_s`: seconds that the stated request mix takes at its median rates; None if it failed.

    `ratio_to_best` with its interval compares paired trials: 1.10 means ten percent slower than the chosen
    one.
    """

    candidate: str
    engine: str
    predicted_s: float | None = None
    warm_trials: int = 0
    load_s: float | None = None
    score_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    ttft_s: float | None = None
    ratio_to_best: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


class Rejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate, or a family of them, that was not chosen; `count` is how many it stands for."""

    candidate: str
    stage: Stage
    reason: str
    count: int = 1


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the choice rests on. `decided`: why measuring stopped; `chosen_because`: what told the winner.

    `undecided`: finalists that the budget left no time to tell from the winner; () where all were.
    """

    budget_s: float
    spent_s: float
    decided: str
    chosen_because: str
    seed: int
    candidates: tuple[CandidateResult, ...]
    trials: tuple[Trial, ...]
    undecided: tuple[str, ...] = ()


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    architecture: str
    paths: tuple[str, ...]
    bytes: int
    context_length_tokens: int | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`id` is not part of the file: the store sets it when it reads or writes one."""

    format_version: int
    placewright_version: str
    created_at: str  # UTC, ISO 8601
    model: ModelIdentity
    placement: Placement
    workload: Workload
    key: PlanKey
    host: Host
    ram_read: tuple[ReadRate, ...]  # the measured ceiling, for stating shares of it later
    memory: MemoryNeed
    evidence: Evidence
    rejected: tuple[Rejected, ...] = ()
    gpu_memory: tuple[MemoryNeed, ...] = ()  # of each GPU in use, by ascending number
    id: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not belong together; a file then reads as no plan."""
        if self.placement.engine not in {build.name for build in self.key.engine_builds}:
            raise ValueError(f"its key holds no build of its engine, {self.placement.engine}")
        if len(self.gpu_memory) != len(self.placement.gpu_ordinals):
            raise ValueError("it has other GPUs in its placement than in its memory")

    @property
    def engine_build(self) -> EngineBuild:
        """The build of the engine that was chosen."""
        return next(build for build in self.key.engine_builds if build.name == self.placement.engine)


def without_none(value: Any) -> Any:
    """TOML has no null: a missing field says None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def plan_builtins(plan: Plan) -> dict[str, Any]:
    """A plan as plain dicts and lists, `id` first where it is known; what `--json` prints."""
    content = msgspec.to_builtins(plan)
    plan_id = content.pop("id")
    return {"id": plan_id, **content} if plan_id else content


def encode_plan(plan: Plan) -> bytes:
    """The file of a plan: UTF-8 TOML, fields in the order of the structs."""
    content = msgspec.to_builtins(plan)
    del content["id"]
    return tomli_w.dumps(without_none(content)).encode()


def plan_id_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:ID_DIGITS]


def decode_plan(data: bytes, plan_id: str) -> Plan:
    """Reads a plan file and checks it against the id in its name.

    Raises PlanError with the reason when the bytes are not those that were written, or not a plan of this
    version.
    """
    if (actual := plan_id_of(data)) != plan_id:
        raise PlanError(
            f"plan {plan_id} is damaged: its content now hashes to {actual}, it was changed after writing; "
            "restore the file from a backup or run `placewright plan` again"
        )
    try:
        content = tomllib.loads(data.decode())
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise PlanError(
                f"plan {plan_id} has format version {version}, this Placewright reads {FORMAT_VERSION}; "
                "run `placewright plan` again or use the version that wrote it"
            )
        return msgspec.structs.replace(msgspec.convert(content, Plan), id=plan_id)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise PlanError(f"plan {plan_id} is not readable: {error}; run `placewright plan` again") from error
