"""The command line: exit codes, where text goes, the shape of --json, help for every command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
import typer.main

import placewright
from planner import cli
from planner.engines import EngineOffer
from planner.pipeline import Outcome
from planner.workload import PlanRequest
from plans.plan import FileIdentity, Limits
from plans.show import CANDIDATE_KEY
from plans.store import PlanStore
from tests.planner.fakes import card
from tests.plans.samples import sample_plan
from tests.tiny import write_model


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.delenv("PLACEWRIGHT_CONFIG", raising=False)
    return tmp_path / "xdg_data_home" / "placewright" / "plans"


def commands() -> list[tuple[str, ...]]:
    root = typer.main.get_command(placewright.make_app())
    found: list[tuple[str, ...]] = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        found.append((name,))
        found += [(name, inner) for inner in getattr(command, "commands", {})]
    return found


def test_all_commands_are_there() -> None:
    names = {command[0] for command in commands()}
    assert {"inspect", "probe", "plan", "plans", "show", "serve", "bench", "doctor", "engines"} <= names
    assert ("bench", "run") in commands()


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert placewright.run([*command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_inspect_prints_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    assert placewright.run(["inspect", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "llama"
    assert placewright.run(["inspect", str(model)]) == 0
    assert "architecture" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "/nowhere.gguf"],
        ["inspect"],
        ["inspect", "/"],
        ["plan", "/nowhere.gguf"],
        ["plan", "/nowhere.gguf", "--load-mode", "zip"],
        ["plan", "/nowhere.gguf", "--budget-s", "0"],
        ["plan", "/nowhere.gguf", "--budget-s", "nan"],
        ["plan", "/nowhere.gguf", "--engines", ","],
        ["plan", "/nowhere.gguf", "--kv", ""],
        ["plan", "/nowhere.gguf", "--host-memory-mib", "0"],
        ["plan", "/nowhere.gguf", "--ctx", "many"],
        ["show", "abc"],
        ["show"],
        ["bench", "run", "abc"],
        ["bench", "run", "abc", "--rounds", "1"],
        ["serve", "abc"],
        ["nonsense"],
        ["plans", "--nonsense"],
    ],
    ids=" ".join,
)
def test_refused_input_is_exit_code_2_and_nothing_on_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert placewright.run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.strip()
    assert "Traceback" not in output.err


def test_plans_and_show(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert placewright.run(["plans", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    saved = PlanStore(folders).save(sample_plan())
    (folders / "junk.toml").write_text("junk")
    assert placewright.run(["plans", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["id"] == saved.id and "damaged" in listed[1]
    assert placewright.run(["show", saved.id[:6], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"]["engine"] == "native"
    assert placewright.run(["show", saved.id[:6]]) == 0
    output = capsys.readouterr().out
    assert saved.id in output and "/models/fake.gguf" in output and CANDIDATE_KEY in output
    assert placewright.run(["plans"]) == 0
    output = capsys.readouterr().out
    assert f"{saved.id[:12]} fake native" in " ".join(output.split()) and "damaged: junk.toml" in output


def test_names_that_the_terminal_can_not_show_are_escaped(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlanStore(folders).save(
        sample_plan(files=(FileIdentity("/models/m\u00e8\U0001f600.gguf", 10, "ab" * 32),))
    )
    for command, shown in (
        (["plans"], r"m\xe8\U0001f600"),
        (["plans", "--json"], r"m\u00e8\ud83d\ude00.gguf"),
    ):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", stdout)
        assert placewright.run(command) == 0
        stdout.seek(0)
        text = stdout.read()
        assert shown in text
        assert "--json" not in command or json.loads(text)[0]["model"]["paths"] == [
            "/models/m\u00e8\U0001f600.gguf"
        ]


def test_an_unwritten_settings_file_is_fine_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[plan]\nconcurency = 2\n")
    monkeypatch.setenv("PLACEWRIGHT_CONFIG", str(settings))
    assert placewright.run(["plan", str(write_model(tmp_path))]) == 2
    assert "concurency" in capsys.readouterr().err


def test_plan_turns_flags_into_one_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[PlanRequest] = []

    def make_plan(request: PlanRequest, _: object) -> Outcome:
        seen.append(request)
        return Outcome(card(), sample_plan(), True, None)

    monkeypatch.setattr(cli.pipeline, "make_plan", make_plan)
    flags = "--ctx 512 --concurrency 3 --kv f16,q8_0 --engines native,llama-server,native --budget-s 7 --threads 2"
    more = "--ubatch 96 --load-mode mmap --host-memory-mib 900 --allow-storage-streaming --replan --json"
    assert placewright.run(["plan", "m.gguf", *flags.split(), *more.split()]) == 0
    (request,) = seen
    assert (request.context_length_tokens, request.concurrency, request.budget_s) == (512, 3, 7.0)
    assert request.kv_types == ("f16", "q8_0") and request.replan and not request.dry_run
    limits = request.limits
    assert limits.engines == ("native", "llama-server")
    assert (limits.threads, limits.ubatch_tokens, limits.load_mode) == (2, 96, "mmap")
    assert limits.host_memory_mib == 900 and limits.allow_storage_streaming
    output = capsys.readouterr()
    assert json.loads(output.out)["workload"]["concurrency"] == 1
    assert "--replan measures again" in output.err


def test_what_the_budget_left_open_is_said_beside_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample_plan()
    evidence = msgspec.structs.replace(plan.evidence, undecided=("native d1",))
    outcome = Outcome(card(), msgspec.structs.replace(plan, evidence=evidence), False, None)
    monkeypatch.setattr(cli.pipeline, "make_plan", lambda *_: outcome)
    assert placewright.run(["plan", "m.gguf", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["evidence"]["undecided"] == ["native d1"]
    assert "could be told apart from native d1" in output.err and "larger --budget-s" in output.err


def test_interrupts_are_130_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.pipeline, "make_plan", interrupt)
    assert placewright.run(["plan", "m.gguf"]) == 130
    assert capsys.readouterr().err == "placewright: interrupted\n"


def test_doctor_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = placewright.run(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {"settings", "native library", "instruction sets", "huge pages", "engines", "plans"} <= set(checks)
    assert code == (1 if any(check["state"] == "failed" for check in checks.values()) else 0)
    assert all(check["remedy"] for check in checks.values() if check["state"] == "failed")


def test_doctor_finds_plans_that_can_not_be_read(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.parent.mkdir(parents=True)
    folders.touch()
    assert placewright.run(["doctor"]) == 1
    assert "FAIL  plans: cannot read the folder of plans" in capsys.readouterr().out


def test_doctor_finds_broken_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "settings.toml"
    broken.write_text("[[[")
    monkeypatch.setenv("PLACEWRIGHT_CONFIG", str(broken))
    assert placewright.run(["doctor"]) == 1


def test_engines_lists_native_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert placewright.run(["engines", "--json"]) == 0
    names = [offer["name"] for offer in json.loads(capsys.readouterr().out)]
    assert names[:2] == ["native", "llama-server"]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert placewright.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("placewright ")


def test_engines_that_can_not_be_used_say_why_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer = EngineOffer("native", "native", None, None, "the library is missing " * 9, "run scripts/install")
    monkeypatch.setattr(cli.engines, "offers", lambda settings: (offer,))
    assert placewright.run(["engines"]) == 0
    said = capsys.readouterr()
    assert "cannot be used" in said.out and max(map(len, said.out.splitlines())) < 80
    assert "run scripts/install" in said.err


def test_settings_of_the_plan_table_reach_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(
        "[plan]\ntuning_budget_s = 9\ncontext_length_tokens = 777\nconcurrency = 2\nkv_types = ['q8_0']\n"
        "engines = ['llama-server']\nhost_memory_mib = 900\nhost_memory_margin_mib = 11\ngpu_memory_mib = 800\n"
        "allow_storage_streaming = true\n"
    )
    monkeypatch.setenv("PLACEWRIGHT_CONFIG", str(settings))
    seen: list[PlanRequest] = []

    def make_plan(request: PlanRequest, _: object) -> Outcome:
        seen.append(request)
        return Outcome(card(), sample_plan(), True, None)

    monkeypatch.setattr(cli.pipeline, "make_plan", make_plan)
    assert placewright.run(["plan", "m.gguf"]) == 0
    (request,) = seen
    assert (request.budget_s, request.default_context_length_tokens, request.concurrency) == (9, 777, 2)
    assert request.kv_types == ("q8_0",)
    assert request.limits == Limits(
        engines=("llama-server",),
        host_memory_mib=900,
        host_memory_margin_mib=11,
        gpu_memory_mib=800,
        allow_storage_streaming=True,
    )
