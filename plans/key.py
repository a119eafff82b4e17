"""The key of a plan: model files, machine, engine builds, workload and limits; and whether it still holds here.

`serve` calls `open_verified_plan`. Every mismatch comes with its reason and its remedy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from configs.errors import PlanError
from configs.paths import cache_folder, plans_folder
from plans import host
from plans.files import HashCache, HashProgress, hash_file
from plans.library import library_path, worker_folder
from plans.machine import Host
from plans.placement import NATIVE
from plans.plan import EngineBuild, FileIdentity, Limits, Plan, PlanKey, Workload
from plans.store import PlanStore

_SOURCE_SUFFIXES = (".cpp", ".h", ".c", ".cu", ".cuh")


class Mismatch(msgspec.Struct, frozen=True):
    """One thing in which this place differs from the one a plan was made for."""

    what: str  # "model", "machine", "engine"
    reason: str
    remedy: str


def _hash_many(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name
        digest.update(f"{name}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


def native_build(version: str, folder: Path | None = None) -> EngineBuild:
    """Kernel sources and the compiled library. Raises PlanError when the library was not built."""
    root = folder or worker_folder()
    library = library_path(folder)
    if not library.is_file():
        raise PlanError(
            f"the native engine's library is not built ({library} is missing); run scripts/build-cpu"
        )
    sources = [file for file in root.rglob("*") if file.suffix in _SOURCE_SUFFIXES]
    return EngineBuild(NATIVE, version, _hash_many([library, *sources], root), str(library))


def executable_build(name: str, executable: Path, version: str) -> EngineBuild:
    """An engine that is a program: the binary and the libraries that were shipped beside it."""
    if not executable.is_file():
        raise PlanError(f"engine {name}: {executable} is missing; install it again or plan without it")
    real = executable.resolve()
    beside = [file for pattern in ("libllama*.so*", "libggml*.so*") for file in real.parent.glob(pattern)]
    return EngineBuild(name, version, _hash_many({real, *beside}, real.parent), str(executable))


def identify_files(
    paths: Iterable[str], cache: HashCache | None = None, progress: HashProgress | None = None
) -> tuple[FileIdentity, ...]:
    hashes = cache or default_hash_cache()
    files = [Path(path).absolute() for path in paths]
    return tuple(
        FileIdentity(str(file), file.stat().st_size, hashes.sha256(file, progress)) for file in files
    )


def default_hash_cache() -> HashCache:
    return HashCache(cache_folder() / "file-hashes.json")


def make_key(
    files: tuple[FileIdentity, ...],
    machine_fingerprint: str,
    builds: tuple[EngineBuild, ...],
    workload: Workload,
    limits: Limits,
) -> PlanKey:
    """The digest does not depend on where the files lie, so a moved model is the same model."""
    content = {
        "model": [(file.bytes, file.sha256) for file in files],
        "machine": machine_fingerprint,
        "engines": [(build.name, build.version, build.sha256) for build in builds],
        "workload": msgspec.to_builtins(workload),
        "limits": msgspec.to_builtins(limits),
    }
    digest = hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:16]
    return PlanKey(digest, files, machine_fingerprint, builds, workload, limits)


def verify_model(
    plan: Plan, cache: HashCache | None = None, progress: HashProgress | None = None
) -> list[Mismatch]:
    hashes = cache or default_hash_cache()
    found = []
    for file in plan.key.model_files:
        path = Path(file.path)
        if not path.is_file():
            reason = f"model file {file.path} is missing"
        elif (size := path.stat().st_size) != file.bytes:
            reason = f"model file {file.path} has {size:,} bytes, the plan was made for {file.bytes:,}"
        elif (actual := hashes.sha256(path, progress)) != file.sha256:
            reason = (
                f"model file {file.path} has SHA-256 {actual[:12]}, the plan was made for {file.sha256[:12]}"
            )
        else:
            continue
        found.append(
            Mismatch("model", reason, "put the planned file back, or run `placewright plan` for this one")
        )
    return found


def verify_machine(plan: Plan, here: Host) -> list[Mismatch]:
    if here.fingerprint == plan.key.machine_fingerprint:
        return []
    reason = f"this is another machine than the plan was measured on ({host.difference(plan.host, here)})"
    return [Mismatch("machine", reason, "run `placewright plan` here")]


def verify_engine(plan: Plan, native_folder: Path | None = None) -> list[Mismatch]:
    """Only the engine that was chosen has to be the same; the others merely lost against it."""
    planned = plan.engine_build
    if planned.sha256 is None:
        return []
    try:
        if planned.name == NATIVE:
            actual = native_build(planned.version, native_folder)
        else:
            actual = executable_build(planned.name, Path(planned.executable or ""), planned.version)
    except PlanError as error:
        return [Mismatch("engine", str(error), "run `placewright plan` again once the engine is there")]
    if actual.sha256 == planned.sha256:
        return []
    reason = (
        f"engine {planned.name} was rebuilt or replaced (build {actual.sha256 and actual.sha256[:12]}, "
        f"the plan was measured with {planned.sha256[:12]})"
    )
    return [Mismatch("engine", reason, "run `placewright plan` again, or put the planned build back")]


def verify(
    plan: Plan,
    *,
    here: Host | None = None,
    cache: HashCache | None = None,
    native_folder: Path | None = None,
    progress: HashProgress | None = None,
) -> list[Mismatch]:
    """Everything in which this place differs from the plan's key; [] when the plan holds."""
    return [
        *verify_model(plan, cache, progress),
        *verify_machine(plan, here or host.read_host()),
        *verify_engine(plan, native_folder),
    ]


def open_verified_plan(prefix: str, folder: Path | None = None, progress: HashProgress | None = None) -> Plan:
    """The plan with this id or unique prefix, checked against its id, the model, this machine and the engine.

    Raises PlanError that lists every mismatch with its remedy.
    """
    plan = PlanStore(folder or plans_folder()).find(prefix)
    mismatches = verify(plan, progress=progress)
    if mismatches:
        words = "; ".join(f"{item.reason} (remedy: {item.remedy})" for item in mismatches)
        raise PlanError(f"plan {plan.id} does not hold here: {words}")
    return plan
