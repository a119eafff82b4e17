"""Starts `placewright serve PLAN_ID` on a free port, asks one question, prints answer and speed, stops the server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import httpx

START_DEADLINE_S = 120
ANSWER_DEADLINE_S = 300


def start(plan_id: str) -> tuple[subprocess.Popen[str], str]:
    """The server process and its base URL, once it says that it listens."""
    command = [f"{sys.prefix}/bin/placewright", "serve", plan_id, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and (line := process.stderr.readline()):
        print(line, end="", file=sys.stderr)
        if match := re.search(r"http://\S+", line):
            return process, match.group(0).rstrip("/")
    process.kill()
    raise SystemExit("the server did not start")


def ask(url: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 128, "temperature": 0}
    started = time.monotonic()
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_DEADLINE_S)
    answer.raise_for_status()
    seconds = time.monotonic() - started
    document = answer.json()
    tokens = document["usage"]["completion_tokens"]
    print(
        f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tok/s with the prompt", file=sys.stderr
    )
    return document["choices"][0]["message"]["content"]


def main() -> int:
    if len(sys.argv) != 3:
        raise SystemExit("usage: ask-once.py PLAN_ID QUESTION")
    plan_id, question = sys.argv[1:]
    process, url = start(plan_id)
    try:
        print(ask(url, question))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    print(
        f"\nNext: .venv/bin/placewright serve {plan_id[:12]}   then talk to http://127.0.0.1:8090/v1",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
