"""The plan folder: written once, whole or not at all, found by prefix, honest about damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.errors import PlanError
from plans.store import PlanStore
from tests.plans.samples import sample_plan


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


def dates(count: int) -> list[str]:
    return [f"2026-05-{day:02d}T10:00:00+00:00" for day in range(1, count + 1)]


def test_save_and_load(store: PlanStore) -> None:
    saved = store.save(sample_plan())
    assert store.load(saved.id) == saved
    assert store.path_of(saved.id).stat().st_mode & 0o777 == 0o444
    assert [file.name for file in store.folder.iterdir()] == [f"{saved.id}.toml"]


def test_the_same_content_is_one_file(store: PlanStore) -> None:
    assert store.save(sample_plan()).id == store.save(sample_plan()).id
    assert len(list(store.folder.iterdir())) == 1


def test_nothing_is_ever_overwritten(store: PlanStore) -> None:
    saved = store.save(sample_plan())
    path = store.path_of(saved.id)
    path.chmod(0o644)
    path.write_bytes(b"someone else's")
    with pytest.raises(PlanError, match="exists with other content"):
        store.save(sample_plan())
    assert path.read_bytes() == b"someone else's"


@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_a_crash_while_writing_leaves_no_plan(
    store: PlanStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def crash(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, crash)
    with pytest.raises(PlanError, match="No space left"):
        store.save(sample_plan())
    monkeypatch.undo()
    assert list(store.folder.iterdir()) == []
    assert store.list().plans == ()


def test_an_interrupt_while_writing_leaves_no_plan(store: PlanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(sample_plan())
    assert list(store.folder.iterdir()) == []


def test_leftovers_of_a_killed_writer_are_swept_when_old(store: PlanStore) -> None:
    store.folder.mkdir(parents=True)
    old, fresh = store.folder / ".a.1234.tmp", store.folder / ".b.1234.tmp"
    old.touch()
    fresh.touch()
    os.utime(old, (1, 1))
    store.save(sample_plan())
    assert not old.exists() and fresh.exists()
    assert len(store.list().plans) == 1 and store.list().damaged == ()


def test_list_is_newest_first_and_survives_damage(store: PlanStore) -> None:
    plans = [store.save(sample_plan(created_at=date)) for date in dates(3)]
    broken = store.path_of(plans[0].id)
    broken.chmod(0o644)
    broken.write_bytes(broken.read_bytes().replace(b"native", b"natives"))
    (store.folder / "notes.toml").write_text("hello")
    listing = store.list()
    assert [plan.id for plan in listing.plans] == [plans[2].id, plans[1].id]
    assert {item.name for item in listing.damaged} == {broken.name, "notes.toml"}


def test_an_empty_or_missing_folder_lists_nothing(store: PlanStore) -> None:
    assert store.list().plans == ()
    with pytest.raises(PlanError, match="none yet"):
        store.find("ab")


def test_find_by_prefix(store: PlanStore) -> None:
    plans = [store.save(sample_plan(created_at=date)) for date in dates(20)]
    for plan in plans:
        assert store.find(plan.id) == plan
        assert store.find(plan.id[:12].upper()) == plan
        assert store.find(f"{plan.id}.toml") == plan
    with pytest.raises(PlanError, match="no plan has an id that begins with 'xyz'"):
        store.find("xyz")


def test_an_ambiguous_prefix_lists_the_candidates(store: PlanStore) -> None:
    ids = [store.save(sample_plan(created_at=date)).id for date in dates(20)]
    digit = max("0123456789abcdef", key=lambda digit: sum(item.startswith(digit) for item in ids))
    matches = [item for item in ids if item.startswith(digit)]
    assert len(matches) > 1
    with pytest.raises(PlanError, match="ambiguous") as caught:
        store.find(digit)
    assert all(item in str(caught.value) for item in matches)


@pytest.mark.parametrize("prefix", ["", "  ", "../../etc/passwd", "*", "a/b"])
def test_prefixes_that_are_no_ids_find_nothing(store: PlanStore, prefix: str) -> None:
    store.save(sample_plan())
    with pytest.raises(PlanError):
        store.find(prefix)


def test_find_by_key_is_the_newest_intact_one(store: PlanStore) -> None:
    plans = [store.save(sample_plan(created_at=date)) for date in dates(2)]
    assert store.find_by_key(plans[0].key.digest) == plans[1]
    assert store.find_by_key("nothing") is None


def test_a_folder_that_can_not_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "plans").touch()
    broken = PlanStore(tmp_path / "plans")
    for ask in (broken.list, lambda: broken.find("ab"), lambda: broken.find_by_key("x")):
        with pytest.raises(PlanError, match=r"folder of plans .*: Not a directory"):
            ask()


def test_an_unwritable_folder_is_refused_with_words(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(PlanError, match="cannot write the plan"):
        PlanStore(blocker / "plans").save(sample_plan())


def test_a_fifo_among_the_plans_is_not_waited_for(store: PlanStore) -> None:
    saved = store.save(sample_plan())
    other = "0" * len(saved.id)
    os.mkfifo(store.path_of(other))
    assert [plan.id for plan in store.list().plans] == [saved.id]
    with pytest.raises(PlanError, match="not a regular file"):
        store.load(other)
