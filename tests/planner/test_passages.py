"""Passages: how they are cut, and which texts are refused."""

from __future__ import annotations

import pytest

from configs.errors import UserError
from planner.passages import Material, degenerate_reason
from planner.prompt_texts import PromptText
from tests.planner.fakes import encode, texts


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
