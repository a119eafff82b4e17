"""A child process with a log: its own process group, dies with its parent, can always be ended, leaves last words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from configs.errors import EngineStartError

LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 16
MOST_LOG_BYTES = 16 << 20  # a log beyond this is put aside, once


class ChildProcess:
    """A running program. stderr goes to `log_path`, or to a file that disappears with this object.

    stdin and stdout are pipes when `pipes` was asked for; else stdout joins the log.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        log_file: BinaryIO,
        log_path: Path | None,
        log_begin_bytes: int,
    ) -> None:
        self.process = process
        self._log_file = log_file
        self._log_path = log_path
        self._log_begin_bytes = log_begin_bytes  # what is before was written by others

    @staticmethod
    async def spawn(
        command: Sequence[str], log_path: Path | None, pipes: bool, env: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Raises EngineStartError when there is no such program."""
        log_file = _open_log(log_path)
        begin_bytes = os.fstat(log_file.fileno()).st_size
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else log_file,
                stderr=log_file,
                env=env,
                start_new_session=True,  # a group of its own: all of it can be killed, and our Ctrl-C is not its
            )
        except OSError as error:
            log_file.close()
            raise EngineStartError(f"cannot start {command[0]}: {error}") from error
        except BaseException:
            log_file.close()
            raise
        return ChildProcess(process, log_file, log_path, begin_bytes)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def kill(self) -> None:
        """SIGKILL for the whole group; works on stopped processes too."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> None:
        """Wait for the end, for grace_s kindly, then by force."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        self.kill()
        await self.process.wait()

    def close(self) -> None:
        """Let go of the log and of stdin."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log_file.close()

    def exit_words(self) -> str:
        code = self.process.returncode
        if code is None:
            return "it still runs"
        if code >= 0:
            return f"it ended with exit code {code}"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"

    def last_words(self) -> str:
        """The end of the log, beginning with a line break; empty when it said nothing."""
        if self._log_file.closed:
            return ""
        descriptor = self._log_file.fileno()
        size_bytes = os.fstat(descriptor).st_size
        # pread, since the child writes at the position that we share with it
        tail = os.pread(descriptor, LOG_TAIL_BYTES, max(self._log_begin_bytes, size_bytes - LOG_TAIL_BYTES))
        lines = tail.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        where = f" of {self._log_path}" if self._log_path else ""
        return f"\nlast lines{where}:\n  " + "\n  ".join(lines) if lines else ""


def _open_log(log_path: Path | None) -> BinaryIO:
    """For appending; the caller closes it."""
    if log_path is None:
        descriptor, name = tempfile.mkstemp(prefix="placewright-", suffix=".log")
        os.unlink(name)
        return os.fdopen(descriptor, "a+b")
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > MOST_LOG_BYTES:
            log_path.replace(log_path.with_name(log_path.name + ".old"))
        return open(log_path, "a+b")
    except OSError as error:
        raise EngineStartError(f"cannot write the log {log_path}: {error}") from error
