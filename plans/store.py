"""The plan folder: one read-only file a plan, `<id>.toml`, written once and never overwritten.

A write goes to a temporary file, is synced, linked to its final name and the folder synced, so a crash leaves
either the whole plan or nothing (temporary files are swept by a later write).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from configs.errors import PlanError
from configs.paths import read_regular_bytes
from plans.plan import ID_DIGITS, Plan, decode_plan, encode_plan, plan_id_of

_TEMPORARY_SUFFIX = ".tmp"
_STALE_S = 3600
_PLAN_NAME = re.compile(rf"[0-9a-f]{{{ID_DIGITS}}}\.toml")
_PREFIX = re.compile(r"[0-9a-f]+")


class DamagedPlan(msgspec.Struct, frozen=True):
    """A file of the folder that is no valid plan, and why."""

    name: str
    reason: str


class PlanListing(msgspec.Struct, frozen=True):
    plans: tuple[Plan, ...]  # newest first
    damaged: tuple[DamagedPlan, ...]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class PlanStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, plan_id: str) -> Path:
        return self.folder / f"{plan_id}.toml"

    def save(self, plan: Plan) -> Plan:
        """Writes a plan and returns it with its id. Saving the same content twice changes nothing.

        Raises PlanError when the folder cannot be written.
        """
        data = encode_plan(plan)
        plan_id = plan_id_of(data)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            self._write_once(self.path_of(plan_id), data)
        except OSError as error:
            raise PlanError(
                f"cannot write the plan to {self.folder}: {error.strerror}; check permissions and space, "
                "or point XDG_DATA_HOME elsewhere"
            ) from error
        return msgspec.structs.replace(plan, id=plan_id)

    def _write_once(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # Unlike rename, link never replaces: the name holds the content's hash, so what is there is this
            # plan or a damaged file that somebody has to look at.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(self.folder)
        if path.read_bytes() != data:
            raise PlanError(f"{path} exists with other content than its id says; move it away and plan again")

    def _sweep(self) -> None:
        for leftover in self.folder.glob(f".*{_TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _STALE_S:
                    leftover.unlink()

    def _files(self) -> list[Path]:
        """What is in the folder, sorted by name; nothing where there is none. Raises PlanError: it cannot be read."""
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PlanError(f"cannot read the folder of plans {self.folder}: {error.strerror}") from error

    def _ids(self) -> list[str]:
        return [file.stem for file in self._files() if _PLAN_NAME.fullmatch(file.name)]

    def load(self, plan_id: str) -> Plan:
        """Raises PlanError when the file is gone, changed or unreadable."""
        try:
            data = read_regular_bytes(self.path_of(plan_id))
        except OSError as error:
            raise PlanError(f"cannot read plan {plan_id}: {error.strerror}") from error
        return decode_plan(data, plan_id)

    def list(self) -> PlanListing:
        """Every plan, newest first, and every file that claims to be one and is not. Raises PlanError."""
        plans: list[Plan] = []
        damaged: list[DamagedPlan] = []
        for file in self._files():
            if file.suffix != ".toml":
                continue
            if not _PLAN_NAME.fullmatch(file.name):
                damaged.append(
                    DamagedPlan(file.name, f"not a plan's name ({ID_DIGITS} hex digits and .toml)")
                )
                continue
            try:
                plans.append(self.load(file.stem))
            except PlanError as error:
                damaged.append(DamagedPlan(file.name, str(error)))
        plans.sort(key=lambda plan: (plan.created_at, plan.id), reverse=True)
        return PlanListing(tuple(plans), tuple(damaged))

    def find(self, prefix: str) -> Plan:
        """The plan whose id begins with `prefix`. Raises PlanError when there is none or more than one."""
        wanted = prefix.strip().lower().removesuffix(".toml")
        ids = self._ids()
        matches = (
            [plan_id for plan_id in ids if plan_id.startswith(wanted)] if _PREFIX.fullmatch(wanted) else []
        )
        if len(matches) == 1:
            return self.load(matches[0])
        if not matches:
            known = ", ".join(ids[:8]) + (" ..." if len(ids) > 8 else "")
            there = (
                f"there are {len(ids)}: {known}"
                if ids
                else "there are none yet: run `placewright plan MODEL`"
            )
            raise PlanError(f"no plan has an id that begins with {prefix!r}; {there}")
        raise PlanError(f"{prefix!r} is ambiguous: {', '.join(matches)}; type more digits")

    def find_by_key(self, digest: str) -> Plan | None:
        """The newest intact plan that answers the same question."""
        return next((plan for plan in self.list().plans if plan.key.digest == digest), None)
