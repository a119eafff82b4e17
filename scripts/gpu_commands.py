"""The commands a user types, on a GPU machine: doctor, probe, plan, plans, show, serve, bench run.

    gpu_commands.py MODEL.gguf FOLDER [LLAMA_BIN]

Raises where a command fails or the plan leaves the GPU out. FOLDER gets everything that the commands print.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_processes import placewright, run_for_model, serving

DEADLINE_S = 120.0
PLAN_BUDGET_S = "15"
ROUNDS = "3"
LONG_PROMPT = "def main():\n" * 240  # several steps of 512 tokens, if tokens are not long
Row = tuple[str, str]


class Commands:
    """Runs them one after the other; what each says is kept in the folder under its number."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._count = 0

    def json(self, *arguments: str) -> Any:
        return json.loads(self.text(*arguments, "--json"))

    def text(self, *arguments: str) -> str:
        self._count += 1
        done = placewright(*arguments, timeout_s=DEADLINE_S)
        name = f"{self._count}-{'-'.join(word for word in arguments[:2] if word.isalpha())}.txt"
        (self.folder / name).write_text(f"{' '.join(arguments)}\n\n{done.stdout}\n---- stderr\n{done.stderr}")
        return done.stdout

    def rows(self, has_baseline: bool) -> Iterator[Row]:
        steps = [self.doctor, self.probe, self.plan, self.lists, self.serve]
        for step in [*steps, self.bench] if has_baseline else steps:
            started_s = time.monotonic()
            name, words = step()
            yield name, f"{words} ({time.monotonic() - started_s:.0f} s)"

    def doctor(self) -> Row:
        checks = self.json("doctor")
        return "doctor", ", ".join(f"{check['name']} {check['state']}" for check in checks)

    def probe(self) -> Row:
        report = self.json("probe", "--reprobe")
        gpus = [f"{gpu['name']} {(gpu['read_bytes_per_s'] or 0) / 1e9:,.0f} GB/s" for gpu in report["gpus"]]
        if not gpus:
            raise RuntimeError(f"the probe found no GPU; missing: {report['missing']}")
        self.text("probe")
        return "probe", ", ".join([*gpus, *report["missing"]])

    def plan(self) -> Row:
        arguments = ("plan", str(self.model), "--budget-s", PLAN_BUDGET_S)
        plan = self.json(*arguments)
        again = self.json(*arguments)
        if again["id"] != plan["id"]:
            moved = {
                name: (key, again["key"][name])
                for name, key in plan["key"].items()
                if key != again["key"][name]
            }
            raise RuntimeError(f"the same question made another plan; of its key these changed: {moved}")
        devices = sorted({item["device"] for item in plan["placement"]["assignments"]})
        if not any(device.startswith("gpu") for device in devices):
            raise RuntimeError(f"the plan runs on {devices}: {plan['evidence']['chosen_because']}")
        self.plan_id = plan["id"][:12]
        best = plan["evidence"]["candidates"][0]
        speed = (
            f"prefill {best['prefill_tokens_per_s']:,.0f}, decode {best['decode_tokens_per_s']:,.0f} tok/s"
        )
        return "plan", f"{self.plan_id} on {', '.join(devices)}, {speed}"

    def lists(self) -> Row:
        listing, shown = self.text("plans"), self.text("show", self.plan_id)
        if self.plan_id not in listing or self.plan_id not in shown:
            raise RuntimeError(f"plans or show do not name {self.plan_id}: {listing} {shown}")
        return "plans, show", f"name {self.plan_id}"

    def serve(self) -> Row:
        with serving(self.plan_id, self.folder / "serve.log") as url:
            body = {"prompt": "def main():\n", "max_tokens": 32, "temperature": 0}
            answer = post(f"{url}/v1/completions", body)
            again = post(f"{url}/v1/completions", body)
            long = post(f"{url}/v1/completions", {**body, "prompt": LONG_PROMPT})
        text, tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        if not text or text != again["choices"][0]["text"]:
            raise RuntimeError(f"two greedy answers differ: {text!r}, {again['choices'][0]['text']!r}")
        read = long["usage"]["prompt_tokens"]
        return "serve", f"{tokens} tokens, twice the same: {text[:60]!r}; a prompt of {read:,} tokens too"

    def bench(self) -> Row:
        result = self.json("bench", "run", self.plan_id, "--baseline", "llama-server", "--rounds", ROUNDS)
        ratios = [f"{name} {result[f'{name}_speedup']['ratio']:.2f}x" for name in ("prefill", "decode")]
        return "bench run", f"{', '.join(ratios)}; tuned: {'; '.join(result['tuning']) or 'nothing'}"


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def check_commands(model: Path, folder: Path, llama_bin: Path | None) -> Iterator[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    if llama_bin is not None:
        os.environ["PATH"] = f"{llama_bin}{os.pathsep}{os.environ['PATH']}"
    yield from Commands(model, folder).rows(has_baseline=llama_bin is not None)


if __name__ == "__main__":
    sys.exit(run_for_model(str(__doc__), check_commands))
