"""A program that answers like llama-server: started with its options, no model needed. The prompt's first id chooses.

Answers are the ids 100, 101, ...; the model file's name may hold "refuses" (ends at start) or "slow".
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELP = "-c, --ctx-size N  size\n--load-mode MODE  mode\n--device D  d\n--cache-ram N  n\n--no-ui  x\n--parallel N  n\n"
SPLIT_CHARACTER, DIES, HANGS, EOG = 7, 8, 9, 3


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: dict[str, str] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        context_tokens = int(self.options["--ctx-size"]) // int(self.options["--parallel"])
        pages: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {
                "default_generation_settings": {"n_ctx": context_tokens},
                "total_slots": int(self.options["--parallel"]),
                "build_info": "b1-fake",
            },
            "/v1/models": {"data": [{"id": "m", "meta": {"n_vocab": 500}}]},
            "/slots": [{"is_processing": False}],
        }
        self._json(200, pages[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json(200, {"tokens": [101, 102] if body["content"] == "é" else [499]})
        elif self.path == "/detokenize":
            self._json(200, {"content": "é" if body["tokens"] == [101, 102] else "?"})
        elif len(body["prompt"]) >= 64:
            error = {"code": 400, "message": "64 is too many", "type": "exceed_context_size_error"}
            self._json(400, {"error": error})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        kind = body["prompt"][0]
        n_sent = 0
        while n_sent < body["n_predict"]:
            if kind == SPLIT_CHARACTER and n_sent == 1:
                n_sent += 2  # the first half of the character has no event
                self._event(content="é", tokens=[102], tokens_predicted=n_sent, stop=False)
                continue
            if n_sent == 2 and kind in (DIES, HANGS):
                if kind == DIES:
                    sys.stderr.write("out of luck\n")
                    sys.stderr.flush()

                    os._exit(5)
                time.sleep(60)
            n_sent += 1
            if kind == EOG and n_sent == 3:
                self._event(content="", tokens=[EOG], tokens_predicted=n_sent, stop=False)
                break
            probabilities = [
                {"id": 99 + n_sent, "logprob": -1.5, "top_logprobs": [{"id": 4, "logprob": -0.5}]}
            ]
            extra = {"completion_probabilities": probabilities} if body.get("n_probs") else {}
            self._event(content="x", tokens=[99 + n_sent], tokens_predicted=n_sent, stop=False, **extra)
        timings = {
            "cache_n": 1,
            "prompt_n": 2,
            "prompt_ms": 10.0,
            "predicted_n": n_sent,
            "predicted_ms": 20.0,
        }
        stop_type = "eos" if kind == EOG else "limit"
        self._event(
            content="", tokens=[], tokens_predicted=n_sent, stop=True, stop_type=stop_type, timings=timings
        )
        self.close_connection = True

    def _event(self, **fields: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    if "--help" in sys.argv:
        print(HELP)
        return
    Handler.options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if "refuses" in Handler.options["--model"]:
        sys.exit("error: unknown model architecture: 'nobody'")
    if "slow" in Handler.options["--model"]:
        time.sleep(60)
    ThreadingHTTPServer(("127.0.0.1", int(Handler.options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
