"""Folders and named files: what cannot be used is told with the reason and what to change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.paths import read_text_file, reason_of, usable_folder


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    assert usable_folder(tmp_path / "a" / "b", "XDG_DATA_HOME").is_dir()


def test_a_folder_that_can_not_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SettingsError, match=r"file/placewright: Not a directory; .* point XDG_DATA_HOME elsewhere"
    ):
        usable_folder(tmp_path / "file" / "placewright", "XDG_DATA_HOME")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SettingsError, match="Permission denied"):
        usable_folder(tmp_path, "XDG_DATA_HOME")


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/nowhere"])
def test_only_regular_files_are_read(path: str) -> None:
    with pytest.raises(OSError) as caught:
        read_text_file(Path(path))
    assert "Errno" not in reason_of(caught.value)


def test_what_is_no_text_is_told_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(UnicodeDecodeError) as caught:
        read_text_file(tmp_path / "file")
    assert reason_of(caught.value) == "byte 2 is not UTF-8 text"


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(SettingsError, match="No space left on device"):
        usable_folder(tmp_path, "XDG_DATA_HOME")
