"""`placewright serve` as a process of its own, with the fake engine in place of a plan's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import typer

from configs.errors import PlacewrightError
from server import cli
from server.model_info import ModelInfo
from tests.fakes.engine import CONTEXT_LENGTH_TOKENS, FakeFarm
from tests.fakes.http import scripted
from tests.fakes.text import N_VOCAB, fake_text

PLAN = SimpleNamespace(
    id="0123456789abcdef", model=SimpleNamespace(name="Tiny"), key=SimpleNamespace(model_files=())
)


def main() -> None:
    farm = FakeFarm(scripted, N_VOCAB)
    farm.token_s = 0.01
    info = ModelInfo("tiny", PLAN.id, 1_700_000_000, CONTEXT_LENGTH_TOKENS, N_VOCAB)
    fakes: dict[str, Any] = {
        "open_verified_plan": lambda plan_id: PLAN,
        "load_text": lambda plan: fake_text(),
        "engine_factory": lambda plan, settings, text: farm.new_engine,
        "model_info": lambda plan, text: info,
    }
    vars(cli).update(fakes)
    app = typer.Typer()
    cli.mount(app)
    try:
        app(standalone_mode=False)
    except PlacewrightError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
