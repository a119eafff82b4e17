"""What the pipeline works with besides the request: settings, store, machine, engines, tokenizer, clock.

Everything outside of the planner comes in through here, so a test replaces what it has not got.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from configs.paths import plans_folder
from configs.settings import Settings
from configs.version import placewright_version
from planner.engines import ModelCodec, builds_of, make_factory
from planner.passages import Encode
from planner.pool import EngineFactory
from planner.probe import probe_machine
from planner.progress import Reporter
from planner.turn import measuring_turn
from plans import host
from plans.key import identify_files
from plans.machine import Host, MachineReport
from plans.plan import EngineBuild, FileIdentity
from plans.store import PlanStore


def encoder_of(model_path: Path) -> Encode:
    """The model's own tokenizer, for plain text. Raises ModelFileError for a tokenizer that is not known."""
    return ModelCodec(model_path).encode


def _identify(paths: tuple[str, ...], reporter: Reporter) -> tuple[FileIdentity, ...]:
    def show(name: str, done: int, total: int) -> None:
        reporter.busy(f"hashing {name}: {done * 100 // max(1, total)} %")

    return identify_files(paths, progress=show)


@dataclass(frozen=True)
class Context:
    settings: Settings
    reporter: Reporter = field(default_factory=Reporter)
    store: PlanStore = field(default_factory=lambda: PlanStore(plans_folder()))
    read_host: Callable[[], Host] = host.read_host
    probe: Callable[[Host, bool, Reporter], MachineReport] = probe_machine
    identify: Callable[[tuple[str, ...], Reporter], tuple[FileIdentity, ...]] = _identify
    builds: Callable[[tuple[str, ...], Settings], tuple[EngineBuild, ...]] = builds_of
    factory: Callable[[Path, Settings], EngineFactory] = make_factory
    encoder: Callable[[Path], Encode] = encoder_of
    turn: Callable[[Reporter], AbstractContextManager[None]] = measuring_turn
    clock: Callable[[], float] = time.perf_counter
    version: str = field(default_factory=placewright_version)
