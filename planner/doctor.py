"""`placewright doctor`: what this place has and lacks, each lack with its remedy. Checks only, changes nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from configs.errors import PlanError, SettingsError
from configs.paths import cache_folder, data_folder, plans_folder, settings_file
from configs.settings import Settings, load_settings
from planner.engines import offers
from plans import host
from plans.library import library_path, worker_folder
from plans.machine import Gpu
from plans.store import PlanStore

State = Literal["ok", "note", "failed"]
_ENOUGH_DISK_BYTES = 1 << 30


class Check(msgspec.Struct, frozen=True):
    """`note`: works, but something is worth knowing."""

    name: str
    state: State
    found: str
    remedy: str | None = None


def _settings() -> Check:
    file = settings_file()
    try:
        load_settings()
    except SettingsError as error:
        return Check("settings", "failed", str(error), f"correct or remove {file}")
    return Check("settings", "ok", str(file) if file.is_file() else f"none at {file}, all defaults")


def _library() -> Check:
    """Loads the library in another process: a broken one must not take this one along."""
    path = library_path()
    if not path.is_file():
        return Check(
            "native library", "failed", f"{path} is missing", "run scripts/build-cpu (needs g++ and cmake)"
        )
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.pw_isa.restype = ctypes.c_char_p; "
        "print(library.pw_abi_version(), library.pw_isa().decode())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=30
    )
    if result.returncode != 0:
        words = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return Check(
            "native library", "failed", f"{path} does not load: {words}", "run scripts/build-cpu again"
        )
    abi, isa = result.stdout.split()
    return Check("native library", "ok", f"ABI {abi}, kernels run at {isa}")


def _instruction_sets() -> Check:
    flags = host.read_cpu().flags
    level = host.kernel_level(flags)
    if level is None:
        missing = ", ".join(host.missing_flags(flags))
        return Check(
            "instruction sets", "failed", f"the CPU lacks {missing}", "use --engines llama-server here"
        )
    if level == "avx2":
        return Check("instruction sets", "note", "AVX2, no AVX-512 with VNNI and BF16: prefill is slower")
    return Check("instruction sets", "ok", "AVX-512 VNNI")


def _cores() -> Check:
    cpu = host.read_cpu()
    found = f"{cpu.cores_available} of {cpu.cores_online} cores usable"
    if cpu.cores_available < cpu.cores_online:
        return Check("cores", "note", found, "affinity or a container quota holds the others back")
    return Check("cores", "ok", found)


def _huge_pages() -> Check:
    file, mode = host.HUGE_PAGES_FILE, host.huge_pages_mode()
    if mode is None:
        return Check("huge pages", "note", f"{file} is missing: packed weights lie on small pages")
    if mode == "never":
        return Check(
            "huge pages", "note", "off: decode is 5 to 25 % slower", f"echo madvise | sudo tee {file}"
        )
    return Check("huge pages", "ok", mode)


def _gpus(gpus: tuple[Gpu, ...], absent: str | None, has_cupy: bool) -> Check:
    if not gpus:
        return Check("GPUs", "ok", f"none: {absent}")
    names = ", ".join(f"{gpu.name} (driver {gpu.driver_version})" for gpu in gpus)
    if has_cupy:
        return Check("GPUs", "ok", names)
    remedy = "pip install 'placewright[cuda13]' (or [cuda12] for a driver before 580)"
    return Check("GPUs", "note", f"{names}, unused: CuPy is not installed", remedy)


def _gpus_here() -> Check:
    return _gpus(*host.read_gpus(), importlib.util.find_spec("cupy") is not None)


def _engines() -> Check:
    try:
        settings = load_settings()
    except SettingsError:
        settings = Settings()
    ready = [offer.name for offer in offers(settings) if offer.reason is None]
    lacking = [offer for offer in offers(settings) if offer.reason is not None]
    if not ready:
        return Check("engines", "failed", "no engine can be used", lacking[0].remedy)
    if lacking:
        words = "; ".join(f"{offer.name}: {offer.reason}" for offer in lacking)
        return Check("engines", "note", f"usable: {', '.join(ready)}. {words}", lacking[0].remedy)
    return Check("engines", "ok", ", ".join(ready))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return folder if folder.exists() or folder == folder.parent else _existing(folder.parent)


def _folder(name: str, folder: Path, variable: str) -> Check:
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "failed", f"{there} cannot be written", f"set {variable} to a folder that can")
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / (1 << 30):.1f} GiB free"
    if free < _ENOUGH_DISK_BYTES:
        return Check(name, "note", found, f"free some space or set {variable}")
    return Check(name, "ok", found)


def _plans() -> Check:
    try:
        listing = PlanStore(plans_folder()).list()
    except PlanError as error:
        return Check(
            "plans",
            "failed",
            str(error),
            "give yourself access to it, or set XDG_DATA_HOME to another folder",
        )
    if listing.damaged:
        names = ", ".join(item.name for item in listing.damaged)
        return Check(
            "plans",
            "note",
            f"{len(listing.plans)} intact, damaged: {names}",
            "remove or restore the damaged files",
        )
    return Check("plans", "ok", f"{len(listing.plans)} saved")


def _packages() -> Check:
    """The worker runs in a process of its own and has to find the same packages."""
    return Check("packages", "ok", f"Python {sys.version.split()[0]}, worker in {worker_folder()}")


def run_checks() -> tuple[Check, ...]:
    checks: tuple[Callable[[], Check], ...] = (
        _packages,
        _settings,
        _library,
        _instruction_sets,
        _cores,
        _huge_pages,
        _gpus_here,
    )
    return (
        *(check() for check in checks),
        _engines(),
        _folder("data folder", data_folder(), "XDG_DATA_HOME"),
        _folder("cache folder", cache_folder(), "XDG_CACHE_HOME"),
        _plans(),
    )


def check_text(check: Check) -> str:
    mark = {"ok": "ok  ", "note": "note", "failed": "FAIL"}[check.state]
    remedy = f"\n      remedy: {check.remedy}" if check.remedy else ""
    return f"{mark}  {check.name}: {check.found}{remedy}"
