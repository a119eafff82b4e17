"""Chat templates: messages in, prompt out; and templates that loop, swell, pry or refuse."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from configs.errors import ModelFileError, RequestError
from tests.model.tiny_vocabulary import bpe_metadata
from worker.model.chat_template import ChatTemplate, load_chat_template, normalize_messages

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}"""
HELLO = [{"role": "user", "content": "hello"}]

Maker = Callable[..., ChatTemplate]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes templates and stops their processes at the end."""
    made: list[ChatTemplate] = []

    def build(source: str, **options: Any) -> ChatTemplate:
        made.append(ChatTemplate(source, **options))
        return made[-1]

    yield build
    for template in made:
        template.close()


def failure(template: ChatTemplate, messages: list[dict[str, Any]] = HELLO) -> str:
    with pytest.raises(RequestError) as raised:
        template.render(messages)
    assert raised.value.code == "template_error"
    return str(raised.value)


def test_chatml_renders_a_conversation(make: Maker) -> None:
    template = make(CHATML)
    messages = [{"role": "developer", "content": 'Be <brief> & "kind"'}, *HELLO]
    shown = '<|im_start|>system\nBe <brief> & "kind"<|im_end|>\n\n<|im_start|>user\nhello<|im_end|>\n\n'
    assert template.render(messages) == shown + "<|im_start|>assistant\n"
    assert template.render(messages, add_generation_prompt=False) == shown


def test_what_templates_count_on(make: Maker) -> None:
    source = (
        "{{ bos_token }}{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{{ {'b': '<é>', 'a': [1]} | tojson }}{{ {'a': 1} | tojson(indent=1) }}"
        "{{ strftime_now('%Y') | length }}{{ ('x' | safe) + '<' }}{{ ([1] | map('string')) | tojson }}"
        "{% set parts = [] %}{% set _ = parts.append('p') %}{{ parts | join }}{{ thinking }}"
        "{{ tools is none }}{{ ('{\"k\": 5}' | from_json).k }}"
    )
    template = make(source, special_tokens={"bos_token": "<s>"})
    expected = '<s>13hello{"b": "<é>", "a": [1]}{\n "a": 1\n}4x<["1"]pofTrue5'
    assert template.render(HELLO, thinking="of") == expected


def test_tools_choose_their_own_template(make: Maker) -> None:
    template = make("plain", tool_source="{{ tools[0].function.name }}")
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"type": "function", "function": {"name": "look"}}]) == "look"


def test_tool_arguments_as_objects_and_as_strings(make: Maker) -> None:
    def render(source: str, arguments: object) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return make(source).render([*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])

    as_object = (
        "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    )
    as_string = "{{ 'args ' + messages[1].tool_calls[0].function.arguments }}"
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        assert render(as_object, arguments) == "city=Köln"
        assert render(as_string, arguments) == 'args {"city": "Köln"}'
    assert render(as_string, "no JSON") == "args no JSON"


def test_typed_content_where_the_template_wants_it(make: Maker) -> None:
    typed = make("{{ messages[0].content[0]['text'].upper() }}{{ messages[0].content[0].lang.upper() }}")
    parts = [{"type": "text", "text": "hello", "lang": "en"}]
    assert typed.render([{"role": "user", "content": parts}]) == "HELLOEN"


def test_system_words_move_where_the_template_knows_no_system(make: Maker) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert "<|im_start|>user\nBe brief.\nhello<|im_end|>" in make(source).render(messages)
    assert "no system" in failure(make(source), messages[:1])


def test_refusals_carry_the_templates_words(make: Maker) -> None:
    assert "roles must alternate" in failure(make("{{ raise_exception('roles must alternate') }}"))
    assert "line 1" in failure(make("{% if %}"))
    assert "unsafe" in failure(make("{{ ''.__class__.__mro__ }}"))
    assert "nested" in failure(make("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_an_endless_template_is_stopped_and_the_next_render_works(make: Maker) -> None:
    template = make("{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}done", limit_s=0.5)
    template.warm()
    started = time.monotonic()
    assert "longer than 0.5 s" in failure(template, [{"role": "user", "content": "loop"}])
    assert time.monotonic() - started < 3
    assert template.render(HELLO) == "done"


def test_a_stopped_process_is_killed(make: Maker) -> None:
    template = make("done", limit_s=0.3)
    template.warm()
    (child,) = template._process._children
    os.kill(child.pid, signal.SIGSTOP)
    assert "longer than" in failure(template)
    assert child.poll() == -signal.SIGKILL
    assert template.render(HELLO) == "done"


def test_a_killed_process_is_replaced(make: Maker) -> None:
    template = make("done")
    template.warm()
    template._process._children[0].kill()
    template._process._children[0].wait()
    assert template.render(HELLO) == "done"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 9999999999 }}", "memory"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "beyond 100000 characters"),
    ],
)
def test_output_and_memory_are_bounded(make: Maker, source: str, words: str) -> None:
    assert words in failure(make(source, limit_characters=100_000))


def test_threads_share_one_process(make: Maker) -> None:
    template = make("{{ messages[0].content }}")
    wrong: list[str] = []

    def work(name: str) -> None:
        for turn in range(20):
            said = f"{name}{turn}" * 1000
            if template.render([{"role": "user", "content": said}]) != said:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_context_that_is_no_json(make: Maker) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="JSON"):
        make("x").render(HELLO, extra=nested)
    with pytest.raises(RequestError, match="JSON"):
        make("x").render(HELLO, extra=object())


def test_values_of_a_client_may_have_any_name(make: Maker) -> None:
    source = "{{ messages[0].content }} {{ source }}"
    assert make(source).render(HELLO, **{"self": 1, "messages": 2, "source": 3, "a b": 4}) == "hello 3"


def test_load_from_metadata() -> None:
    assert load_chat_template({}) is None
    template = load_chat_template(
        bpe_metadata(**{"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"})
    )
    assert template is not None
    assert template.render(HELLO) == "<|im_start|>|<|im_end|>"
    template.close()
    with pytest.raises(ModelFileError, match="int"):
        load_chat_template({"tokenizer.chat_template": 5})


def test_normalized_messages() -> None:
    given = [
        {"role": "developer", "content": "rules"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "x",
        },
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant"},
    ]
    before = json.dumps(given)
    assert normalize_messages(given) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "x"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_malformed_messages_name_the_field(message: Any, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        normalize_messages([message])
    assert raised.value.param == field and raised.value.code == "invalid_request"


def test_the_type_of_a_refused_part_is_named() -> None:
    with pytest.raises(RequestError, match="'image_url'"):
        normalize_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
