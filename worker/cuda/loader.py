"""CUDA sources of this folder to cubins: includes spliced into the text, results kept on disk.

A variant is a source file with its `-D` definitions. The cache key covers the spliced text, the definitions,
the architecture and the compiler's version, so an edit of a header is always seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from configs.paths import cache_folder
from worker.cuda.nvrtc import CompileError, Nvrtc, required_nvrtc

SOURCES = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^#include "([\w.]+)"\s*$', re.MULTILINE)


def spliced(source: str) -> str:
    """The text of `source` (a file name of this folder) with each included file once, in place."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (SOURCES / name).read_text()
        pieces, line = [f'#line 1 "{name}"\n'], 1
        position = 0
        for match in _INCLUDE.finditer(text):
            before = text[position : match.start()]
            line += before.count("\n") + 1
            pieces += [before, expand(match.group(1)), f'\n#line {line} "{name}"\n']
            position = match.end() + 1
        return "".join([*pieces, text[position:]])

    return expand(source)


def options_for(defines: Mapping[str, int | float | str], architecture: int) -> tuple[str, ...]:
    flags = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return (f"--gpu-architecture=sm_{architecture}", "--std=c++17", "-default-device", *flags)


def cubin(
    source: str,
    defines: Mapping[str, int | float | str],
    architecture: int,
    nvrtc: Nvrtc | None = None,
    extra_options: tuple[str, ...] = (),
    text: str | None = None,
) -> bytes:
    """Machine code of one variant for `architecture` (10 * major + minor), from the cache where it is there.

    `extra_options` are the compiler's own, for tests; `text` is the source, spliced, where the caller has it. Raises
    CompileError with file, variant and the compiler's words.
    """
    nvrtc = nvrtc or required_nvrtc()
    text, options = text or spliced(source), (*options_for(defines, architecture), *extra_options)
    key = hashlib.sha256("\0".join((text, *options, repr(nvrtc.version))).encode()).hexdigest()
    path = cache_folder() / "cubin" / f"{source.removesuffix('.cu')}-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    try:
        code = nvrtc.compile(text, source, options)
    except CompileError as error:
        variant = " ".join(options)
        raise CompileError(f"{source} does not compile as {variant}:\n{error}") from error
    _store(path, code)
    return code


def _store(path: Path, code: bytes) -> None:
    """Write at once or not at all; a cache that can not be written only costs time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
