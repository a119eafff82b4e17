"""The process that renders chat templates: a program that knows jinja2 and the standard library only.

A template comes with the model file, so it is a stranger's program. Python cannot stop a thread: an endless
loop, a huge multiplication or a slow filter inside of C code never looks at a flag, and nothing bounds a
thread's memory. A process has limits that the kernel enforces: here an alarm ends it at the deadline even if
its parent is gone, and an address space limit turns a memory bomb into a MemoryError. The parent kills it and
starts another.

Requests and answers are JSON documents, each after its length as 8 bytes, on stdin and stdout:
{"template", "context", "limit_s", "limit_characters"} -> {"text"}, {"error"} or {"limit"} (what it ran into).
"""

from __future__ import annotations

import collections.abc
import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_LIMIT_BYTES = 1 << 30


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; rendering keeps its body as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body alone, up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> jinja2.Environment:
    """What the authors of chat templates count on, which is what Hugging Face's transformers offers.

    Lists may be changed (some templates append to their own): the data is this process's private copy anyway.
    """
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.filters["from_json"] = json.loads
    # A prompt is no HTML: marked as safe, a text would make the texts added to it escaped.
    environment.filters["safe"] = str
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: without the HTML escapes that jinja2's own filter puts in."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_to_list,
    )


def _to_list(value: Any) -> list[Any]:
    # Filters such as `map` give generators.
    if isinstance(value, collections.abc.Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def raise_exception(message: str) -> NoReturn:
    """The way in which templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """Now, in local time."""
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compiled once for each source."""
    return make_environment().from_string(source)


def render(request: dict[str, Any]) -> dict[str, str]:
    """The answer to one request; no exception of a template leaves it."""
    limit = request["limit_characters"]
    try:
        parts: list[str] = []
        length = 0
        for part in compile_template(request["template"]).generate(request["context"]):
            length += len(part)
            if length > limit:
                return {"limit": f"the text grew beyond {limit} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"limit": f"rendering needed more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "the template is nested too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"syntax error in line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(8)) == 8:
        request = json.loads(requests.read(int.from_bytes(header, "little")))
        # SIGALRM's default action ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        answer = json.dumps(render(request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    main()
