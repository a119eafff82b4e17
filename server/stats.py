"""What happened since the start, and how fast it is going. A number that is not known is None, never zero."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.errors import RequestError
from server.generation import Outcome, Piece
from server.job import Job
from worker.protocol import Timings

WINDOW = 32  # speeds are those of the last so many finished requests

Number = float | int | None
Recorder = Callable[[Piece | Outcome | None], None]


class ServerStats:
    """Counters since the start of the server."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._recent: deque[Timings] = deque(maxlen=WINDOW)
        self._n = dict.fromkeys(("completed", "failed", "cancelled", "refused"), 0)
        self._prompt_tokens = 0
        self._completion_tokens = 0

    @contextmanager
    def watch(self, job: Job) -> Iterator[Recorder]:
        """Counts one request by how it ends: an outcome, an error, a refusal, or the client gone."""
        ending = "cancelled"

        def record(item: Piece | Outcome | None) -> None:
            nonlocal ending
            if isinstance(item, Outcome):
                ending = "completed"
                self._note(job, item)

        try:
            yield record
        except RequestError:
            ending = "refused"
            raise
        except Exception:
            ending = "failed"
            raise
        finally:
            self._n[ending] += 1

    def as_dict(self) -> dict[str, Number]:
        """Counts, and medians of what the engine timed over the last finished requests."""
        decode = [
            (t.completion_tokens - 1) / t.decode_s
            for t in self._recent
            if t.completion_tokens > 1 and t.decode_s > 0
        ]
        prefill = [
            (t.prompt_tokens - t.cached_tokens) / t.prefill_s
            for t in self._recent
            if t.cached_tokens is not None and t.prefill_s > 0
        ]
        return {
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            **{f"requests_{ending}": count for ending, count in self._n.items()},
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "decode_tokens_per_s": _median(decode),
            "prefill_tokens_per_s": _median(prefill),
            "queue_s": _median([t.queue_s for t in self._recent if t.queue_s is not None]),
        }

    def _note(self, job: Job, outcome: Outcome) -> None:
        self._prompt_tokens += len(job.generate.prompt_ids)
        self._completion_tokens += outcome.completion_tokens
        if outcome.timings is not None:
            self._recent.append(outcome.timings)


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
