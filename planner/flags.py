"""The flags of the planner's commands: type, name and help of each, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.settings import PlanSettings

Version = Annotated[bool, typer.Option("--version", help="Print the version.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[Path, typer.Argument(help="A GGUF file, or any part of a split set.", metavar="MODEL")]
PlanId = Annotated[str, typer.Argument(help="A plan's id or any unique beginning of it.", metavar="PLAN_ID")]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", help="Measure on a text or .jsonl file, or on hf:NAME (a data set)."),
]

_DEFAULTS = PlanSettings()  # a settings file may say otherwise

# ---- plan -------------------------------------------------------------------------------------------------------

Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        help=f"Context of one sequence, in tokens. Default: {_DEFAULTS.context_length_tokens}, at most the model's.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", help=f"Sequences that run at a time. Default: {_DEFAULTS.concurrency}."),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv", help="KV cache type, f16 or q8_0; a list (f16,q8_0) lets the search choose. Default: f16."
    ),
]
Engines = Annotated[
    str | None,
    typer.Option(
        "--engines", help="Engines to consider, by preference: native,llama-server,... Default: native."
    ),
]
BudgetS = Annotated[
    float | None,
    typer.Option(
        "--budget-s",
        help="Most seconds for timing candidates, starts of engines included. Timing ends as soon as it is clear which "
        "one is chosen, usually after a fraction of the default. Probing and hashing, once a machine and a "
        "file, come on top. When it ends, the first engine may still start and the running trial has 5 s left. "
        f"Default: {_DEFAULTS.tuning_budget_s:.0f}.",
    ),
]
GpuMemoryMib = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory-mib", help="Cap on the memory of each GPU, in MiB. Default: what is free, less 512."
    ),
]
HostMemoryMib = Annotated[
    int | None,
    typer.Option(
        "--host-memory-mib",
        help=f"Cap on RAM, in MiB. Default: what is free, less {_DEFAULTS.host_memory_margin_mib}.",
    ),
]
AllowStorageStreaming = Annotated[
    bool, typer.Option("--allow-storage-streaming", help="Weights may be read from storage again and again.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Pin: threads of decode and prefill. Default: searched.")
]
Ubatch = Annotated[
    int | None, typer.Option("--ubatch", help="Pin: most tokens of a step. Default: searched.")
]
LoadModeFlag = Annotated[
    str | None,
    typer.Option(
        "--load-mode",
        help="Pin: mmap (as in the file) or packed (copied for the kernels). Default: searched.",
    ),
]
Replan = Annotated[bool, typer.Option("--replan", help="Measure again; makes another plan.")]
Reprobe = Annotated[bool, typer.Option("--reprobe", help="Measure the machine again, whatever is known.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be measured; write no plan.")]

# ---- bench ------------------------------------------------------------------------------------------------------

Baseline = Annotated[str, typer.Option("--baseline", help="The engine to race against.")]
Rounds = Annotated[int, typer.Option("--rounds", min=2, max=1000, help="Paired rounds.")]
PinnedThreads = Annotated[int | None, typer.Option("--threads", min=1, help="Pin the threads of both sides.")]
Tune = Annotated[
    bool, typer.Option("--threads-tune/--no-threads-tune", help="Tune the baseline's threads first.")
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt.")]
OutputTokens = Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of an output.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the order of trials and of the bootstrap.")]
