"""chat_template of clients: off by default; rendered in a process that a hostile template cannot leave or outlive."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateSyntaxError

from quire.service.api.history import roles_in
from quire.service.api.tools import ChatOptions
from quire.service.chat_templates.client_templates import ClientTemplates
from quire.service.chat_templates.template_probe import names_in
from quire.service.chat_templates.template_worker import _opened, _renderer
from quire.service.common.limits import CLIENT_TEMPLATE_CHARS
from quire.service.common.refusal import Refusal
from quire.service.text.tokenizer import Tokenizer
from tests.pace import patience
from tests.service.fakes import CHAT_TEMPLATE, TOOLS_TEMPLATE, FakeEngine, Served, byte_level, settled, with_template
from tests.service.test_app import says

Serve = Callable[..., Awaitable[Served]]
EngineMaker = Callable[..., FakeEngine]
CPU_S = 0.5
MESSAGES = [{"role": "user", "content": "Hi there"}]
HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}",
    "endless macro": "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
    "huge number": "{{ 10 ** (10 ** 9) }}",
    "huge text": "{{ 'x' * 10 ** 10 }}",
    "long text": "{% for a in range(3000) %}{{ 'x' * 1000 }}{% endfor %}",
    "doubling": "{% set n = namespace(x='xx') %}{% for a in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "too wide": "{{ range(10 ** 9) | list }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "no template": "{% for %}",
    "division": "{{ 1 / 0 }}",
    "own exception": "{{ raise_exception(messages[0].content) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].environ }}",
    "method": "{{ messages.__class__.__init__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "self": "{{ self.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "include": "{% include '/etc/passwd' %}",
    "mutation": "{% set _ = messages.append(1) %}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder = with_template(byte_level(tmp_path_factory.mktemp("templates") / "m"), TOOLS_TEMPLATE)
    made = Tokenizer(str(folder), client_template_s=CPU_S, client_template_chars=2**20)
    made.start()
    yield made
    made.close()


@pytest.fixture
def templates(tokenizer: Tokenizer) -> ClientTemplates:
    assert tokenizer._client_templates is not None
    return tokenizer._client_templates


def render(templates: ClientTemplates, template: str, **more: Any) -> str:
    with templates.open(template) as session:
        return session.render(MESSAGES, **more)


def test_a_template_is_rendered_as_transformers_does(templates: ClientTemplates, tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for template in (CHAT_TEMPLATE, TOOLS_TEMPLATE, "{{ eos_token }}{{ messages | tojson }}{{ x }}"):
        for more in ({}, {"add_generation_prompt": True}, {"tools": tools, "x": 5}):
            expected = tokenizer._hf.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **more)
            assert render(templates, template, **more) == expected
    with templates.open(TOOLS_TEMPLATE) as session:
        assert session.dialect == tokenizer._dialect
    with templates.open("{{ messages[0].content[0].text }}") as session:
        assert (session.dialect.parts, session.dialect.text) == (True, False)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_says_nothing_of_the_process(name: str, templates: ClientTemplates) -> None:
    try:
        text = render(templates, HOSTILE[name])
    except Refusal as refusal:
        found = refusal
    else:
        assert not text  # the sandbox has shown it nothing
        found = Refusal(400, "chat_template_error", "", param="chat_template")
    assert (found.status, found.code, found.param) == (400, "chat_template_error", "chat_template")
    assert "Hi there" not in found.message
    assert render(templates, "{{ messages[0].content }}") == "Hi there"  # the next one finds a process


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("doubling", "it takes more than 128 MiB of memory"),
        ("huge text", "it takes more than 128 MiB of memory"),
        ("endless macro", "it fails with RecursionError"),
        ("deep", "it fails with RecursionError"),
        ("no template", "it fails with TemplateSyntaxError"),
    ],
)
def test_a_hopeless_template_runs_once(name: str, why: str, templates: ClientTemplates) -> None:
    """It is not tried with other messages: filling memory once takes a part of the time that a client waits."""
    with pytest.raises(Refusal) as refused, templates.open(HOSTILE[name]):
        pytest.fail("its session began")
    assert refused.value.message == f"chat_template: {why}"


@pytest.mark.parametrize("error", [MemoryError, RecursionError, TemplateSyntaxError("x", 1)])
def test_the_first_hopeless_failure_ends_the_probes(
    error: Exception | type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(**given: Any) -> None:
        calls.append(given)
        raise error

    monkeypatch.setattr("transformers.utils.chat_template_utils.render_jinja_template", fail)
    assert _opened(_renderer("", {}), "").error
    assert len(calls) == 1


def test_another_failure_is_of_the_probe_alone() -> None:
    """As of a template that raises where roles do not alternate."""
    template = "{{ raise_exception('x') if messages | length > 1 else messages[0].content }}"
    opened = _opened(_renderer(template, {}), template)
    assert opened.dialect is not None
    assert opened.dialect.text


def test_the_process_knows_no_key_and_is_started_again(
    templates: ClientTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "secret")
    for _ in range(2):
        assert templates._process is not None
        process = templates._process.pid
        os.kill(process, signal.SIGKILL)
        templates._process.wait()
        assert render(templates, "{{ messages[0].role }}") == "user"
        assert templates._process.pid != process
        assert b"secret" not in Path(f"/proc/{templates._process.pid}/environ").read_bytes()


async def post(served: Served, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **fields}
    async with served.session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def test_it_is_off_by_default_and_bounded(serve: Serve, tokenizer: Tokenizer) -> None:
    closed, allowed = await serve(), await serve(tokenizer, client_template_s=CPU_S)
    status, answer = await post(closed, chat_template="{{ messages[0].content }}")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported", "chat_template")
    assert "--client-template-s" in answer["error"]["message"]
    status, answer = await post(allowed, chat_template="x" * 65_537)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "too_long", "chat_template")


async def test_engines_get_its_text_and_content_stays_text(
    serve: Serve, engine: EngineMaker, tokenizer: Tokenizer
) -> None:
    served = await serve(tokenizer, client_template_s=CPU_S)
    async with engine(says(tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        template = "{% for m in messages %}<|im_start|>{{ name }}: {{ m.content }}<|im_end|>{% endfor %}"
        said = [{"role": "user", "content": "say <|im_end|> now"}]
        status, answer = await post(
            served, chat_template=template, messages=said, chat_template_kwargs={"name": "Anna"}
        )
        assert status == 200, answer
        [asked] = fake.seen
        assert tokenizer.text_of(asked.token_ids, skip_special=False) == (
            "<|im_start|>Anna: say <|im_end|> now<|im_end|>"
        )
        end = tokenizer._backend.token_to_id("<|im_end|>")
        assert asked.token_ids.count(end) == 1  # the template's own; the user's is text
        status, answer = await post(served, chat_template=template, chat_template_kwargs={"other": 1})
        assert status == 200, answer  # a header names the variable, which the template does not read
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        status, answer = await post(served, chat_template=template, tools=tools)
        assert (status, answer["error"]["param"]) == (400, "tools")
        status, answer = await post(
            served, chat_template=template, stream=True, messages=[{"role": "odd", "content": ""}]
        )
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        assert len(fake.seen) == 2


async def test_hostile_templates_cost_their_senders_only(
    serve: Serve, engine: EngineMaker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While more of them than there are threads for them are held back, other requests of any size are answered."""
    served, held, opened = await serve(tokenizer, client_template_s=CPU_S), threading.Event(), ClientTemplates.open

    def slowly(self: ClientTemplates, template: str) -> Any:
        held.wait(patience(300))
        return opened(self, template)

    monkeypatch.setattr(ClientTemplates, "open", slowly)
    async with engine(says(tokenizer)) as fake:
        await settled(lambda: bool(served.streams.fleet.engines))
        hostile = [
            asyncio.create_task(post(served, chat_template=HOSTILE[name]))
            for name in ("endless loop", "endless macro", "huge number") * 2
        ]
        try:
            for content in ("short", "a long text " * 5000):
                said = [{"role": "user", "content": content}]
                status, answer = await post(served, messages=said, truncate_prompt_tokens=9)
                assert status == 200, answer
            assert not any(task.done() for task in hostile)
        finally:
            held.set()
        async with asyncio.timeout(patience(300)):
            for status, answer in await asyncio.gather(*hostile):
                assert (status, answer["error"]["code"]) == (400, "chat_template_error")
        assert len(fake.seen) == 2


@pytest.mark.parametrize("kind", ["arguments", "roles"])
def test_a_long_template_is_read_once_whatever_comes_with_it(kind: str, tokenizer: Tokenizer) -> None:
    """Outside the process with limits a gateway only looks for names: 2,000 at the end of 64,000 characters."""
    names = [f"a{at}" for at in range(2000)]
    spoken = " ".join(f"'{name}'" for name in names)
    template = "{# " + "'x' " * 12_000 + spoken + " #}{{ messages[-1].role }}"
    assert 60_000 < len(template) <= CLIENT_TEMPLATE_CHARS
    reader = {"arguments": names_in, "roles": roles_in}[kind]
    before = reader.cache_info().misses
    if kind == "arguments":
        given, options = MESSAGES, ChatOptions(template=template, arguments=dict.fromkeys(names, 1))
    else:
        given, options = [{"role": name, "content": ""} for name in names], ChatOptions(template=template)
    assert tokenizer.text_of(tokenizer._encode_chat(given, None, options)) == given[-1]["role"]
    assert reader.cache_info().misses - before <= 1
    with pytest.raises(Refusal):
        tokenizer._encode_chat(
            [{"role": "a2000", "content": ""}], None, ChatOptions(template=template, arguments={"a2000": 1})
        )


@pytest.mark.parametrize(
    ("template", "roles"),
    [("'tool' \"ipython\"'critic''judge'", {"tool", "ipython", "critic", "judge"}), ("'1x' 'a b' x'y", set())],
)
def test_roles_are_what_a_template_has_in_quotes(template: str, roles: set[str]) -> None:
    assert roles_in(template) == roles
    assert roles <= names_in(template)


async def test_a_model_without_a_template_may_get_one(serve: Serve, engine: EngineMaker, tmp_path: Path) -> None:
    folder = with_template(byte_level(tmp_path / "m"), "")
    bare = Tokenizer(str(folder), client_template_s=CPU_S)
    try:
        served = await serve(bare, client_template_s=CPU_S)
        async with engine(says(bare)) as fake:
            await settled(lambda: bool(served.streams.fleet.engines))
            assert (await post(served))[1]["error"]["code"] == "no_chat_template"
            assert (await post(served, chat_template="{{ messages[0].content }}"))[0] == 200
            assert bare.text_of(fake.seen[0].token_ids) == "Hi there"
    finally:
        bare.close()
