"""Preferences of a person, read from one TOML file; every default lives here.

Nothing that belongs to a plan is a setting: what was tuned is in the plan, what the owner of the machine wants
is here. The file is optional; an unknown key or a bad value is refused with its name, never skipped.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from configs import paths
from configs.errors import SettingsError

SMALLEST_CONTEXT_TOKENS = 64

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
TomlArray = Field(strict=False)  # TOML has lists only; a strict tuple would refuse them
Names = Annotated[tuple[Annotated[str, Field(strict=True)], ...], TomlArray]


def _free_engine_name(name: str) -> str:
    if name == "native" or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("the name of an engine has letters, digits, '.', '-' and '_', and is not native")
    return name


class Section(BaseModel):
    """A table of the settings file: frozen, closed to unknown keys, and `true` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SamplingDefaults(Section):
    """Used where a request names no value. The defaults are OpenAI's: plain sampling at temperature 1."""

    temperature: NotNegative = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0  # 0: the likeliest token only
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0


class ServeSettings(Section):
    """`placewright serve`: the HTTP side."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8090
    api_key: Annotated[str, Field(min_length=1)] | None = None  # None: any key is accepted
    cors_origins: Names = ()  # besides pages served from this machine; "*" admits every page
    host_names: Names = ()  # of public DNS, by which a server on loopback without a key may be called
    strict_model_names: bool = False  # True: a request for another model's name is a 404
    max_waiting_requests: Annotated[int, Field(ge=0)] = 64  # beyond those the engine runs at a time
    max_open_requests: Count = 256  # of any kind, streams included
    max_body_bytes: Count = 16 * 1024 * 1024
    max_tokenize_bytes: Count = 1024 * 1024  # of text in /tokenize: about a second and 200 MB of memory
    body_timeout_s: Positive = 30.0
    keep_alive_s: Positive = 10.0  # a comment line in a stream that is silent for so long
    write_timeout_s: Positive = 120.0  # a client that reads nothing for so long is cut off
    drain_s: NotNegative = 15.0  # running requests may finish for so long after SIGTERM
    always_include_usage: bool = False  # for clients that never ask for the usage chunk
    sampling: SamplingDefaults = SamplingDefaults()


class PlanSettings(Section):
    """`placewright plan`: defaults of its flags."""

    tuning_budget_s: Positive = 600.0
    context_length_tokens: Annotated[int, Field(ge=SMALLEST_CONTEXT_TOKENS)] = 4096
    concurrency: Count = 1
    kv_types: Annotated[tuple[Literal["f16", "q8_0"], ...], TomlArray, Field(min_length=1)] = ("f16",)
    engines: Annotated[Names, Field(min_length=1)] = ("native",)
    host_memory_mib: Count | None = None  # None: what is free less the margin
    host_memory_margin_mib: Annotated[int, Field(ge=0)] = 1024
    gpu_memory_mib: Count | None = None  # None: what is free less 512
    allow_storage_streaming: bool = False


class WorkerSettings(Section):
    """The worker process as its parent sees it."""

    start_timeout_s: Positive = 600.0  # from spawn to ready
    heartbeat_s: Positive = 1.0
    silence_s: Positive = 5.0  # a worker that answers nothing for so long is replaced
    stop_timeout_s: Positive = 5.0
    restart_backoff_s: Positive = 0.5  # doubled with each life in a row that served nothing
    restart_backoff_max_s: Positive = 30.0
    failed_starts_in_a_row: Count = 8  # then the server gives up
    healthy_s: Positive = 60.0  # a life of this length counts as a good one even if nobody asked anything


class EngineSettings(Section):
    """An engine beside the native one: a llama-server binary, or a running OpenAI-compatible server."""

    kind: Literal["llama-server", "openai"]
    path: Annotated[Path, Field(strict=False)] | None = None
    url: str | None = None
    model: str | None = None
    api_key: str | None = None
    arguments: Names = ()
    start_timeout_s: Positive = 600.0


class Settings(Section):
    serve: ServeSettings = ServeSettings()
    plan: PlanSettings = PlanSettings()
    worker: WorkerSettings = WorkerSettings()
    engines: dict[Annotated[str, AfterValidator(_free_engine_name)], EngineSettings] = {}


def load_settings(path: Path | None = None) -> Settings:
    """Settings from `path`, by default `configs.paths.settings_file()`; all defaults where no file is.

    Raises SettingsError: unreadable file, one that $PLACEWRIGHT_CONFIG names and is not there, bad TOML, unknown
    keys (with the known ones), bad values.
    """
    file = path or paths.settings_file()
    try:
        table = tomllib.loads(paths.read_text_file(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if isinstance(error, FileNotFoundError) and file != paths.named_settings_file():
            return Settings()
        raise SettingsError(f"cannot read settings file {file}: {paths.reason_of(error)}") from error
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(_describe(detail) for detail in error.errors())
        raise SettingsError(f"settings file {file}: {problems}") from error


def _describe(detail: ErrorDetails) -> str:
    """One problem as `key: what is wrong`; for an unknown key also which ones its table knows."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        return f"{key} = {detail['input']!r}: {detail['msg']}"
    known = ", ".join(sorted(_section(detail["loc"][:-1]).model_fields))
    return f"unknown key {key}; known here: {known}"


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the table at `location`, which is a path that pydantic reported."""
    section: type[BaseModel] = Settings
    parts = iter(location)
    for part in parts:
        if section is Settings and part == "engines":
            next(parts)  # the engine's own name
            section = EngineSettings
            continue
        annotation: Any = section.model_fields[str(part)].annotation
        section = annotation
    return section
