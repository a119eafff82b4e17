"""The texts that are measured with: what is built in, what a user may bring, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from zlib import crc32

import pytest

from configs.errors import MeasureError, UserError
from planner import prompt_texts
from planner.passages import Material
from planner.prompt_texts import built_in, chat_text, load_texts


def words(text: str) -> list[int]:
    return [crc32(word.encode()) % 50_000 for word in text.split()]


def test_the_corpora_have_both_splits_and_are_fit_for_measuring() -> None:
    found = built_in()
    assert {(text.name, text.split) for text in found} == {
        (name, split) for name in ("prose", "code", "agent") for split in ("train", "heldout")
    }
    Material(found, words)  # refuses what is not fit


def test_a_changed_corpus_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("changed")
    row = '[[text]]\nname = "a"\nfile = "a.txt"\nsplit = "train"\nsha256 = "00"\n'
    (tmp_path / "manifest.toml").write_text(row)
    monkeypatch.setattr(prompt_texts.resources, "files", lambda name: tmp_path)
    with pytest.raises(MeasureError, match=r"a\.txt was changed"):
        built_in()


def test_a_text_file_is_cut_in_half(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("first part. second part.")
    found = load_texts(str(file))
    assert [text.split for text in found] == ["train", "heldout"]
    assert "".join(text.text for text in found) == "first part. second part."


def test_json_lines_alternate(tmp_path: Path) -> None:
    rows = ["plain", {"prompt": "a prompt"}, {"messages": [{"role": "user", "content": "hi"}]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    found = load_texts(str(file))
    assert [(text.split, text.text) for text in found] == [
        ("train", "plain"),
        ("heldout", "a prompt"),
        ("train", "user: hi"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe\xff", "UTF-8"),
        ("a.txt", b"   ", "no text"),
        ("a.jsonl", b"{broken", "line 1: not JSON"),
        ("a.jsonl", b'{"other": 1}', "columns"),
        ("a.jsonl", b"", "no text"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_texts(str(tmp_path / name))


def test_a_missing_prompt_file_is_refused() -> None:
    with pytest.raises(UserError, match="--prompts /nowhere"):
        load_texts("/nowhere")


def test_tool_calls_are_part_of_a_conversation() -> None:
    text = chat_text(
        [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "find"}]},
            {"from": "human", "value": "thanks"},
        ]
    )
    assert text.startswith("user: look") and '"find"' in text and text.endswith("human: thanks")


def test_data_sets_come_through_the_datasets_package(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'corpora' is not installed")
    rows = {"text": [f"text number {i}" for i in range(5)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    found = load_texts(f"hf:{tmp_path / 'set'}")
    assert [text.text for text in found] == rows["text"]
    with pytest.raises(UserError, match="cannot be loaded"):
        load_texts(f"hf:{tmp_path / 'nowhere'}")


def test_of_a_data_set_with_several_tables_train_is_read_or_the_last_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'corpora' is not installed")
    tables = {
        name: datasets.Dataset.from_dict({"text": [f"{name} 0", f"{name} 1"]})
        for name in ("test", "train", "validation")
    }
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "three"))
    del tables["train"]
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "two"))
    assert [text.text for text in load_texts(f"hf:{tmp_path / 'three'}")] == ["train 0", "train 1"]
    assert [text.text for text in load_texts(f"hf:{tmp_path / 'two'}")] == ["validation 0", "validation 1"]


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'placewright\[corpora\]'"):
        load_texts("hf:some/set")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.txt")
    with pytest.raises(UserError, match=r"fifo\.txt: not a regular file; give a UTF-8 text"):
        load_texts(str(tmp_path / "fifo.txt"))
