"""From a checked plan to what the server runs on: its engine and its model's text side.

The only page of `server` that reads model files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from configs.errors import EngineStartError
from configs.paths import logs_folder, usable_folder
from configs.settings import Settings
from plans.files import stamp_of
from plans.key import verify_model
from plans.plan import Plan
from server.model_info import ModelInfo
from server.text import Text, Tokenizer
from worker.engines.base import Engine
from worker.engines.registry import make_engine
from worker.model.chat_template import load_chat_template
from worker.model.detokenizer import StopMatcher, StreamDecoder
from worker.model.gguf import open_model
from worker.model.tokenizer import load_tokenizer

SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


class PlainCodec:
    """The tokenizer as engines want it that are other servers: what they wrote, to ids and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=True)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class ModelGuard:
    """Sees to it that an engine which starts again runs the files that the plan was checked with.

    Files whose inode nobody touched are not read again; others are hashed.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stamps = self._read_stamps()

    def check(self) -> None:
        """Raises EngineStartError with what became of which file. Large files that were touched take a while."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        mismatches = verify_model(self._plan)
        if mismatches:
            raise EngineStartError("; ".join(f"{item.reason} ({item.remedy})" for item in mismatches))
        self._stamps = stamps

    def _read_stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(Path(file.path)) for file in self._plan.key.model_files]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        return stamp_of(path.stat())
    except OSError:
        return None


def engine_factory(plan: Plan, settings: Settings, text: Text) -> Callable[[], Engine]:
    """Makes engines that run `plan`, one after the other as they die; they share one log.

    Raises SettingsError where the log cannot be written.
    """
    path = Path(plan.key.model_files[0].path)
    log_path = usable_folder(logs_folder(), "XDG_CACHE_HOME") / f"engine-{plan.id[:12]}.log"
    return partial(make_engine, plan.placement, path, settings, log_path, PlainCodec(text.tokenizer))


def load_text(plan: Plan) -> Text:
    return load_model_text(Path(plan.key.model_files[0].path))


def load_model_text(path: Path) -> Text:
    """Tokenizer and chat template of a model file. Raises ModelFileError where they are not usable."""
    metadata = open_model(path).metadata
    tokenizer = load_tokenizer(metadata)
    template = load_chat_template(metadata)
    if template is not None:
        template.warm()
    return Text(tokenizer, template, partial(StreamDecoder, tokenizer), StopMatcher)


def model_info(plan: Plan, text: Text) -> ModelInfo:
    """What clients see; the model goes by the name of its file, which is how people know quants apart."""
    return ModelInfo(
        name=SPLIT_SUFFIX.sub("", Path(plan.key.model_files[0].path).stem),
        plan_id=plan.id,
        created_unix_s=_unix_s(plan.created_at),
        context_length_tokens=plan.placement.context_length_tokens,
        n_vocab=text.tokenizer.n_vocab,
        architecture=plan.model.architecture,
        file_bytes=plan.model.bytes,
    )


def _unix_s(moment: str) -> int:
    with suppress(ValueError):
        return int(datetime.fromisoformat(moment).timestamp())
    return 0
