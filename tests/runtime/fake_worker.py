"""A worker process with a fake model: `python fake_worker.py serve ...`; the model path is JSON that describes it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configs.errors import ModelFileError
from configs.progress import ProgressCallback
from plans.placement import Placement
from tests.runtime.fake_executor import AheadExecutor, FakeExecutor
from worker.__main__ import main
from worker.runtime.executor import StepBatch, StepFailed

POISON, CRASH, STUCK, BUG = 990, 991, 992, 993  # tokens that end a step badly


def misbehave(batch: StepBatch) -> None:
    tokens = {token for part in batch.parts for token in part.token_ids}
    if POISON in tokens:
        raise StepFailed("poison")
    if CRASH in tokens:
        os.kill(os.getpid(), signal.SIGSEGV)
    if STUCK in tokens:
        time.sleep(3600)
    if BUG in tokens:
        raise ZeroDivisionError("a bug in the executor")


def load(model_path: str, placement: Placement, progress: ProgressCallback) -> FakeExecutor:
    options = json.loads(model_path)
    for index in range(options.pop("load_steps", 2)):
        progress("packing", index, 2)
        time.sleep(options.get("load_s", 0.0))
    options.pop("load_s", None)
    if options.pop("print", False):
        print("noise on stdout", flush=True)
    error = options.pop("error", None)
    if error == "model_file":
        raise ModelFileError("the file is broken at byte 12")
    if error == "memory":
        raise MemoryError("no room for 9 GiB")
    if error == "exit":
        print("last words on stderr", file=sys.stderr, flush=True)
        os._exit(9)
    kind = AheadExecutor if options.pop("runs_ahead", False) else FakeExecutor
    executor = kind(**options, fail=misbehave)
    executor.batches = deque(maxlen=1)  # a long test must not grow because of its own records
    return executor


if __name__ == "__main__":
    main(factory=load)
