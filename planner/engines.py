"""The engines of this machine as the planner sees them: which there are, what build they are, how to make one."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import subprocess
from pathlib import Path

import msgspec

from configs.errors import EngineStartError, PlanError
from configs.paths import logs_folder, usable_folder
from configs.settings import Settings
from configs.version import placewright_version
from planner.pool import EngineFactory
from plans.key import executable_build, native_build
from plans.library import library_path
from plans.placement import NATIVE, Placement
from plans.plan import EngineBuild
from worker.engines.base import Engine
from worker.engines.llama_command import find_program
from worker.engines.registry import LLAMA_SERVER, engine_names, make_engine
from worker.model.gguf import open_model
from worker.model.tokenizer import Tokenizer, load_tokenizer

XLLAMACPP = "xllamacpp"
_VERSION_TIMEOUT_S = 20.0


class EngineOffer(msgspec.Struct, frozen=True):
    """One engine by name. `reason`: why it cannot be used, None when it can."""

    name: str
    kind: str
    version: str | None
    location: str | None
    reason: str | None
    remedy: str | None = None


def offers(settings: Settings) -> tuple[EngineOffer, ...]:
    """Native first, then llama-server, then what the settings name."""
    others = (name for name in engine_names(settings) if name != NATIVE)
    return (_native_offer(), *(_other_offer(name, settings) for name in others))


def _native_offer() -> EngineOffer:
    library = library_path()
    if library.is_file():
        return EngineOffer(NATIVE, NATIVE, placewright_version(), str(library), None)
    return EngineOffer(NATIVE, NATIVE, None, None, f"{library} is missing", "run scripts/build-cpu")


def _other_offer(name: str, settings: Settings) -> EngineOffer:
    entry = settings.engines.get(name)
    if entry is not None and entry.kind == "openai":
        if not (entry.url or "").startswith(("http://", "https://")):
            remedy = f"say engines.{name}.url = 'http://...' in the settings"
            return EngineOffer(name, entry.kind, None, entry.url, f"its url is {entry.url!r}", remedy)
        return EngineOffer(name, entry.kind, None, entry.url, None)
    try:
        program = find_program(entry.path if entry is not None else None)
    except EngineStartError as error:
        reason, _, remedy = str(error).partition("; ")
        remedy = remedy or f"name a llama-server program in the settings: engines.{name}.path"
        return EngineOffer(name, LLAMA_SERVER, None, None, reason, remedy)
    if program.library:
        location, version = library_of_package(XLLAMACPP), distribution_version(XLLAMACPP)
    else:
        location, version = Path(program.command[0]), program_version(program.command[0])
    return EngineOffer(name, LLAMA_SERVER, version, str(location), None)


def library_of_package(package: str) -> Path:
    """The compiled module of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    libraries = sorted(Path(spec.origin).parent.glob("*.so"))
    return libraries[0] if libraries else Path(spec.origin)


def distribution_version(package: str) -> str | None:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def program_version(program: str) -> str | None:
    """The first line of `--version` that names one."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version:").strip() for line in lines if line.startswith("version")), None)


def builds_of(names: tuple[str, ...], settings: Settings) -> tuple[EngineBuild, ...]:
    """The builds of these engines. Raises PlanError for a name that is unknown or cannot be used, with a remedy."""
    known = {offer.name: offer for offer in offers(settings)}
    return tuple(_build(name, known) for name in names)


def _build(name: str, known: dict[str, EngineOffer]) -> EngineBuild:
    offer = known.get(name)
    if offer is None:
        raise PlanError(
            f"there is no engine {name!r}; known are {', '.join(known)} (see `placewright engines`)"
        )
    if offer.reason is not None:
        raise PlanError(f"engine {name} cannot be used: {offer.reason}; {offer.remedy}")
    if name == NATIVE:
        return native_build(placewright_version())
    if offer.kind == "openai":
        return EngineBuild(name, offer.version or "unknown", None, offer.location)
    return executable_build(name, Path(offer.location or ""), offer.version or "unknown")


class ModelCodec:
    """The model's tokenizer for servers that take or return text only; read when it is first needed."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(open_model(self._model_path).metadata)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def make_factory(model_path: Path, settings: Settings) -> EngineFactory:
    """Makes engines of this model; each is started by whoever asked for it. Their logs are kept in one file."""
    log_path = usable_folder(logs_folder(), "XDG_CACHE_HOME") / "planner-engines.log"
    codec = ModelCodec(model_path)

    def make(placement: Placement) -> Engine:
        return make_engine(placement, model_path, settings, log_path, codec)

    return make
