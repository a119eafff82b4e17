"""The parent's side of a child process: spawning it, speaking the worker protocol, ending it."""

from worker.client.child import ChildProcess
from worker.client.worker_client import Deadlines, WorkerClient

__all__ = ["ChildProcess", "Deadlines", "WorkerClient"]
