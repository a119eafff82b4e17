"""The texts that are measured with: the built-in corpora, a user's file, or the rows of an `hf:` data set.

Half of them are `train`, for racing candidates, and half are `heldout`, for confirming the winner on text that it was
not chosen on.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import MeasureError, UserError
from configs.paths import read_text_file, reason_of
from plans.plan import Split

_HF_MOST_ROWS = 64
_HF_COLUMNS = ("text", "prompt", "content", "instruction", "question", "messages", "conversations")


class PromptText(msgspec.Struct, frozen=True):
    name: str
    split: Split
    text: str


def chat_text(messages: list[Mapping[str, Any]]) -> str:
    """A conversation as plain text, one block a message; tool calls as JSON. Same text for every model."""
    blocks = []
    for message in messages:
        role = message.get("role") or message.get("from") or "user"
        content = message.get("content", message.get("value")) or ""
        calls = message.get("tool_calls")
        body = content if isinstance(content, str) else json.dumps(content)
        blocks.append(f"{role}: {body}" + (f"\n{json.dumps(calls, indent=1)}" if calls else ""))
    return "\n\n".join(blocks)


def built_in() -> list[PromptText]:
    """The corpora of this package, checked against the hashes of their manifest."""
    folder = resources.files("planner.corpora")
    manifest = tomllib.loads((folder / "manifest.toml").read_text(encoding="utf-8"))
    texts = []
    for entry in manifest["text"]:
        data = (folder / entry["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise MeasureError(
                f"built-in corpus {entry['file']} was changed; reinstall Placewright or use --prompts"
            )
        body = data.decode()
        text = chat_text(json.loads(body)["messages"]) if entry["file"].endswith(".json") else body
        texts.append(PromptText(entry["name"], entry["split"], text))
    return texts


def _split_alternately(named: Iterator[tuple[str, str]]) -> list[PromptText]:
    """Every second text is held out; a single text is cut in half."""
    rows = [(name, text) for name, text in named if text.strip()]
    if len(rows) == 1:
        name, text = rows[0]
        middle = len(text) // 2
        rows = [(f"{name}, first half", text[:middle]), (f"{name}, second half", text[middle:])]
    return [PromptText(name, "heldout" if i % 2 else "train", text) for i, (name, text) in enumerate(rows)]


def _row_text(row: Mapping[str, Any]) -> str:
    for column in _HF_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return chat_text(value)
    raise UserError(
        f"prompts have none of the columns {', '.join(_HF_COLUMNS)} with text in it; they have {', '.join(row)}"
    )


def from_file(path: Path) -> list[PromptText]:
    """A text file is one prompt text; `.jsonl` has one JSON string or object a line. Raises UserError."""
    try:
        text = read_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {path}: {reason_of(error)}; give a UTF-8 text file or a .jsonl file"
        ) from error
    if path.suffix != ".jsonl":
        return _split_alternately(iter([(path.name, text)]))
    return _split_alternately(_jsonl_rows(path, text))


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"--prompts {path}, line {number}: not JSON ({error})") from error
        yield f"{path.name}:{number}", row if isinstance(row, str) else _row_text(row)


def from_data_set(name: str) -> list[PromptText]:
    """`hf:NAME`: the first rows of a data set, or of a folder that one was saved to. Raises UserError."""
    try:
        import datasets  # only this option needs it: extra "corpora"
    except ImportError as error:
        raise UserError(
            f"--prompts hf:{name} needs the datasets package: pip install 'placewright[corpora]'"
        ) from error
    try:
        loaded = datasets.load_from_disk(name) if _is_saved(name) else datasets.load_dataset(name)
    except Exception as error:  # whatever the library raises, the reason is that this name cannot be loaded
        raise UserError(f"--prompts hf:{name} cannot be loaded: {error}") from error
    table = _one_table(loaded)
    rows = (table[index] for index in range(min(len(table), _HF_MOST_ROWS)))
    return _split_alternately((f"{name}:{index}", _row_text(row)) for index, row in enumerate(rows))


def _one_table(loaded: Any) -> Any:
    """The rows of a loaded data set; where it has several named tables, of `train` or else the last by name."""
    if not isinstance(loaded, Mapping):
        return loaded
    return loaded["train" if "train" in loaded else max(loaded)]


def _is_saved(name: str) -> bool:
    folder = Path(name)
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def load_texts(source: str | None) -> list[PromptText]:
    """Texts of `--prompts`; the built-in ones for None. Raises UserError when a split stays empty."""
    if source is None:
        return built_in()
    texts = from_data_set(source[3:]) if source.startswith("hf:") else from_file(Path(source))
    if len({text.split for text in texts}) < 2:
        raise UserError(
            f"--prompts {source} holds no text to measure with; give at least one non-empty prompt"
        )
    return texts


def texts_sha256(texts: list[PromptText]) -> str:
    return hashlib.sha256(msgspec.json.encode(texts)).hexdigest()
