"""Prompts: what is built in, what a user may bring, what is refused, and how passages are cut."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from configs.errors import MeasureError, UserError
from planner import prompts
from planner.prompts import Material, PromptText, built_in, chat_text, degenerate_reason, load_texts
from tests.planner.fakes import encode, texts


def words(text: str) -> list[int]:
    return [hash(word) % 50_000 for word in text.split()]


def test_the_corpora_have_both_splits_and_are_fit_for_measuring() -> None:
    found = built_in()
    assert {(text.name, text.split) for text in found} == {
        (name, split) for name in ("prose", "code", "agent") for split in ("train", "heldout")
    }
    Material(found, words)


def test_a_changed_corpus_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("changed")
    row = '[[text]]\nname = "a"\nfile = "a.txt"\nsplit = "train"\nsha256 = "00"\n'
    (tmp_path / "manifest.toml").write_text(row)
    monkeypatch.setattr(prompts.resources, "files", lambda name: tmp_path)
    with pytest.raises(MeasureError, match=r"a\.txt was changed"):
        built_in()


def test_passages_repeat_and_never_share_a_beginning() -> None:
    material = Material(texts(), encode)
    passages = [material.passage("train", index, 128, 16) for index in range(12)]
    assert passages == [material.passage("train", index, 128, 16) for index in range(12)]
    assert len({passage.prompt_ids[:4] for passage in passages}) == 12
    assert all(len(item.prompt_ids) == 128 and len(item.output_ids) == 16 for item in passages)


def test_a_passage_longer_than_its_text_goes_on_in_the_next() -> None:
    material = Material(texts(), encode)
    passage = material.passage("heldout", 0, 4000, 100)
    assert len(passage.prompt_ids) == 4000 and len(passage.output_ids) == 100


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([5] * 300, "repeat themselves"),
        ([1, 2] * 200, "repeat themselves"),
        (list(range(300)) + [7] * 300, "repeat themselves"),
        ([1, 2, 3], "only 3 tokens"),
        ([], "only 0 tokens"),
    ],
)
def test_degenerate_prompts_are_refused(ids: list[int], words: str) -> None:
    reason = degenerate_reason(ids)
    assert reason is not None and words in reason
    with pytest.raises(UserError, match="not fit for measuring"):
        Material([PromptText("x", "train", "")], lambda text: ids)


def test_ordinary_prompts_are_not() -> None:
    assert degenerate_reason([i * 7919 % 1000 for i in range(600)]) is None


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
    with pytest.raises(UserError, match="can not be loaded"):
        load_texts(f"hf:{tmp_path / 'nowhere'}")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'placewright\[corpora\]'"):
        load_texts("hf:some/set")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.txt")
    with pytest.raises(UserError, match=r"fifo\.txt: not a regular file; give a UTF-8 text"):
        load_texts(str(tmp_path / "fifo.txt"))
