"""Keys: what makes a plan invalid, said with reason and remedy; and the hash cache that is asked each time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from configs.errors import ModelFileError, PlanError
from plans import files
from plans.files import HashCache, hash_file
from plans.key import Mismatch, executable_build, identify_files, make_key, native_build, verify
from plans.library import LIBRARY_NAME, worker_folder
from plans.plan import Limits, Plan
from tests.planner.fakes import machine_host
from tests.plans.samples import sample_plan, workload


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    folder = tmp_path / "worker"
    (folder / "cpu" / "isa").mkdir(parents=True)
    (folder / "cpu" / LIBRARY_NAME).write_bytes(b"library")
    (folder / "cpu" / "step.cpp").write_text("int main;")
    (folder / "cpu" / "isa" / "dot.h").write_text("dot")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> HashCache:
    return HashCache(tmp_path / "hashes.json")


@pytest.fixture
def plan(tmp_path: Path, worker: Path, cache: HashCache) -> Plan:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and so on")
    return sample_plan(files=identify_files([str(model)], cache), builds=(native_build("0.1.0", worker),))


def mismatches(plan: Plan, worker: Path, cache: HashCache, fingerprint: str = "f00d") -> list[Mismatch]:
    return verify(plan, here=machine_host(fingerprint=fingerprint), cache=cache, native_folder=worker)


def test_an_untouched_place_holds(plan: Plan, worker: Path, cache: HashCache) -> None:
    assert mismatches(plan, worker, cache) == []


def model_of(plan: Plan) -> Path:
    return Path(plan.key.model_files[0].path)


def test_a_swapped_model_of_the_same_size_is_noticed(plan: Plan, worker: Path, cache: HashCache) -> None:
    status = model_of(plan).stat()
    model_of(plan).write_bytes(b"GGUF and so ON")
    os.utime(model_of(plan), ns=(status.st_atime_ns, status.st_mtime_ns))  # mtime alone proves nothing
    (found,) = mismatches(plan, worker, cache)
    assert found.what == "model" and "SHA-256" in found.reason and "placewright plan" in found.remedy


def test_a_grown_or_missing_model_is_noticed(plan: Plan, worker: Path, cache: HashCache) -> None:
    model_of(plan).write_bytes(b"longer than it was before")
    assert "25 bytes, the plan was made for 14" in mismatches(plan, worker, cache)[0].reason
    model_of(plan).unlink()
    assert "missing" in mismatches(plan, worker, cache)[0].reason


def test_another_machine_is_told_by_what_differs(plan: Plan, worker: Path, cache: HashCache) -> None:
    here = machine_host(cores=8, fingerprint="beef")
    (found,) = verify(plan, here=here, cache=cache, native_folder=worker)
    assert found.what == "machine" and "cores_available 4 -> 8" in found.reason


@pytest.mark.parametrize("name", [f"cpu/{LIBRARY_NAME}", "cpu/step.cpp", "cpu/isa/dot.h"])
def test_a_changed_engine_is_noticed(plan: Plan, worker: Path, cache: HashCache, name: str) -> None:
    (worker / name).write_bytes(b"other")
    (found,) = mismatches(plan, worker, cache)
    assert found.what == "engine" and "rebuilt or replaced" in found.reason


def test_a_missing_library_is_noticed(plan: Plan, worker: Path, cache: HashCache) -> None:
    (worker / "cpu" / LIBRARY_NAME).unlink()
    (found,) = mismatches(plan, worker, cache)
    assert "scripts/build-cpu" in found.reason


def test_python_files_are_not_part_of_the_build(plan: Plan, worker: Path, cache: HashCache) -> None:
    (worker / "cpu" / "library.py").write_text("new")
    assert mismatches(plan, worker, cache) == []


def test_all_reasons_come_at_once(plan: Plan, worker: Path, cache: HashCache) -> None:
    model_of(plan).unlink()
    (worker / "cpu" / "step.cpp").write_text("changed")
    found = mismatches(plan, worker, cache, fingerprint="beef")
    assert [item.what for item in found] == ["model", "machine", "engine"]
    assert all(item.remedy for item in found)


def test_other_programs_are_known_by_binary_and_libraries(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_bytes(b"one")
    first = executable_build("llama-server", binary, "b1")
    (tmp_path / "libllama.so.1").write_bytes(b"two")
    second = executable_build("llama-server", binary, "b1")
    assert first.sha256 != second.sha256
    with pytest.raises(PlanError, match="missing"):
        executable_build("llama-server", tmp_path / "nowhere", "b1")


def test_the_digest_covers_each_part_and_no_path() -> None:
    plan = sample_plan()
    parts = (plan.key.model_files, "f00d", plan.key.engine_builds, workload(), Limits())
    base = make_key(*parts).digest
    moved = tuple(msgspec.structs.replace(file, path="/elsewhere") for file in plan.key.model_files)
    assert make_key(moved, *parts[1:]).digest == base
    changed = [
        make_key((), *parts[1:]),
        make_key(parts[0], "beef", *parts[2:]),
        make_key(*parts[:2], (), *parts[3:]),
        make_key(*parts[:3], msgspec.structs.replace(workload(), concurrency=2), parts[4]),
        make_key(*parts[:4], Limits(threads=1)),
    ]
    assert len({base, *(item.digest for item in changed)}) == 6


# ---- the hash cache ---------------------------------------------------------------------------------------------


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had been written a while ago."""
    monkeypatch.setattr(files, "_SETTLED_NS", -1)


def test_a_settled_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    file = tmp_path / "model"
    file.write_bytes(b"abc")
    digest = HashCache(tmp_path / "cache.json").sha256(file)
    assert digest == hash_file(file)

    def never(*_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(files, "hash_file", never)
    assert HashCache(tmp_path / "cache.json").sha256(file) == digest


def test_any_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch)
    cache = HashCache(tmp_path / "cache.json")
    file = tmp_path / "model"
    file.write_bytes(b"abc")
    first, status = cache.sha256(file), file.stat()
    time.sleep(0.02)  # the clock of a file system ticks in milliseconds
    file.write_bytes(b"abd")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.sha256(file) != first


def test_a_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"abc")
    HashCache(tmp_path / "cache.json").sha256(file)
    assert not (tmp_path / "cache.json").exists()


def test_a_damaged_cache_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text("{broken")
    file = tmp_path / "model"
    file.write_bytes(b"abc")
    assert HashCache(tmp_path / "cache.json").sha256(file) == hash_file(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        HashCache(tmp_path / "cache.json").sha256(tmp_path / "nowhere")


def test_progress_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"abc")
    seen: list[tuple[str, int, int]] = []
    hash_file(file, lambda *step: seen.append(step))
    assert seen == [("model", 3, 3)]


def test_the_worker_folder_is_the_one_with_the_sources() -> None:
    folder = worker_folder()
    assert (folder / "protocol.py").is_file() and list(folder.glob("cpu/*.cpp"))
