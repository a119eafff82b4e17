"""From a placement to the engine that it names. The only page that knows all engines."""

from __future__ import annotations

from pathlib import Path

from configs.errors import SettingsError
from configs.settings import EngineSettings, Settings, WorkerSettings
from plans.placement import NATIVE, Placement
from worker.client import Deadlines
from worker.engines.base import Engine, TextCodec

LLAMA_SERVER = "llama-server"


def engine_names(settings: Settings) -> tuple[str, ...]:
    """Those that are always there, then those of the settings."""
    return (NATIVE, LLAMA_SERVER, *(name for name in settings.engines if name not in (NATIVE, LLAMA_SERVER)))


def make_engine(
    placement: Placement,
    model_path: Path,
    settings: Settings,
    log_path: Path | None = None,
    codec: TextCodec | None = None,
) -> Engine:
    """A new engine, not started. Raises SettingsError for a name that nothing is known of.

    `codec` is the model's tokenizer, for servers that take or return text only.
    """
    if placement.engine == NATIVE:
        from worker.engines.native import NativeEngine

        return NativeEngine(placement, model_path, deadlines_of(settings.worker), log_path)
    entry = settings.engines.get(placement.engine)
    if entry is None and placement.engine == LLAMA_SERVER:
        entry = EngineSettings(kind="llama-server")
    if entry is None:
        known = ", ".join(engine_names(settings))
        raise SettingsError(
            f"there is no engine {placement.engine!r}; known are {known}; add [engines.{placement.engine}] to the "
            "settings, or plan for another"
        )
    deadlines = deadlines_of(settings.worker, entry.start_timeout_s)
    return _configured(placement, model_path, entry, deadlines, log_path, codec)


def deadlines_of(worker: WorkerSettings, load_s: float | None = None) -> Deadlines:
    return Deadlines(
        load_s=worker.start_timeout_s if load_s is None else load_s,
        heartbeat_s=worker.heartbeat_s,
        silence_s=worker.silence_s,
        stop_s=worker.stop_timeout_s,
    )


def _configured(
    placement: Placement,
    model_path: Path,
    entry: EngineSettings,
    deadlines: Deadlines,
    log_path: Path | None,
    codec: TextCodec | None,
) -> Engine:
    if entry.kind == "llama-server":
        from worker.engines.llama_server import LlamaServerEngine

        return LlamaServerEngine(placement, model_path, deadlines, log_path, entry.path, entry.arguments)
    from worker.engines.openai import OpenAiEngine

    if entry.url is None:
        raise SettingsError(f"[engines.{placement.engine}] has kind 'openai' and no url; add one")
    return OpenAiEngine(
        entry.url,
        deadlines,
        model=entry.model,
        api_key=entry.api_key,
        codec=codec,
        name=placement.engine,
        context_length_tokens=placement.context_length_tokens,
        max_sequences=placement.max_sequences,
    )
