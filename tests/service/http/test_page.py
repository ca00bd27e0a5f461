"""The playground in a real browser: what a reader sees and does, and what hostile text cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire.messages import Finish, Generate
from quire.loadtest.server import engine_processes
from quire.service.text.tokenizer import Tokenizer
from tests.ports import free_port
from tests.service.fakes import TOOLS_TEMPLATE, FakeEngine, byte_level, with_template
from tests.system.processes import Process, ending, wait_until_ready
from tests.system.stack import GatewayThread

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys

from tests.pace import patience
from tests.service.http.browser import Browser, chromium, missing

if missing():
    pytest.skip(f"the playground's tests need {missing()}", allow_module_level=True)
# The limit is of a hang: every wait has a limit of its own.
pytestmark = pytest.mark.timeout(300)

KEY = "sesame"
MARKDOWN = """# A title

Some **bold**, *slanted* and `<code>` text with [a link](https://example.com/a?b=1&c=2).

1. one
2. two
   - deeper

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>not bold</b>")
```
"""
HOSTILE = (
    "<script>hacked=true</script><img src=x onerror=hacked=true><svg onload=hacked=true></svg>"
    "[a](javascript:hacked=true) ![b](https://evil.example/x.png) [c](data:text/html,<script>hacked=true</script>)\n\n"
    '[d](https://a.example/"onmouseover="hacked=true) <https://b.example/"><img src=x onerror=hacked=true>\n\n'
    "`<img src=x onerror=hacked=true>` **<iframe srcdoc='<script>parent.hacked=true</script>'>**\n\n"
    "```html\n</code></pre><script>hacked=true</script>\n```\n\n| <img src=x onerror=hacked=true> | b |\n|---|---|\n"
    "| \ue0000\ue001\ue0020\ue003 | <a href='javascript:hacked=true'>x</a> |\n\n<style>*{display:none}</style> end"
)
THOUGHT = "<think>\nThey ask about <b>rain</b>.\n</think>\n\nI look.\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "<img src=x onerror=hacked=true>"}}\n</tool_call>'
TOOL = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}
# What the engine says to a message that ends in the word.
SAYS = {
    "markdown": MARKDOWN,
    "hostile": HOSTILE,
    "tools": THOUGHT + CALL,
    "long": " ".join(str(number) for number in range(250)),
}
BEAMS = ("The sea is blue.", "The sea is green.", "The sky\n<img src=x onerror=hacked=true>")


class EngineOnThread:
    """A scripted engine with an event loop of its own, since the browser's driver blocks the test."""

    def __init__(self, redis_url: str, namespace: str, folder: Path) -> None:
        tokenizer = Tokenizer(str(folder))
        (stop,) = tokenizer._encode("<|im_end|>", special=False)

        def script(generate: Generate, index: int) -> tuple[list[int], Finish | None]:
            prompt = tokenizer.text_of(list(generate.token_ids), skip_special=False)
            words = prompt.rpartition("<|im_end|>")[0].split()
            text = SAYS.get(words[-1], f"You said {words[-1]}. Answer {index}.")
            if generate.beams is not None:
                text = BEAMS[index]
            return [*tokenizer._encode(text, special=False), stop], Finish("stop", stop, score=-0.5 - index)

        self.fake = FakeEngine(redis_url, namespace, script)
        self.fake.load_changes = {"max_model_len": 4096, "vocab_size": 600, "beams": 8}
        self.fake.step_s = 0.001
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()

    async def _run(self) -> None:
        async with self.fake:
            await self._stopping.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout=patience(60))
        self._loop.close()


class Site:
    """One engine; a gateway that anyone may use, and one with a key under a path prefix."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.model = with_template(byte_level(folder / "tools"), TOOLS_TEMPLATE)
        self.engine = EngineOnThread(redis_url, namespace, self.model)
        options: dict[str, Any] = {"fleet_s": 0.02, "drain_s": 0.0}
        guarded = {"api_keys": [KEY], "root_path": "/llm/a"}
        self.gateways = [
            GatewayThread(redis_url, namespace, "open", self.model, **options),
            GatewayThread(redis_url, namespace, "guarded", self.model, **guarded, **options),
        ]
        try:
            for gateway in self.gateways:
                gateway.wait_ready(60)
        except BaseException:
            with contextlib.suppress(Exception):  # what failed first is the news
                self.stop()
            raise
        self.url, self.guarded = self.gateways[0].url + "/", self.gateways[1].url + "/llm/a"

    def stop(self) -> None:
        with contextlib.ExitStack() as last:
            last.callback(self.engine.stop)
            for gateway in self.gateways:
                last.callback(gateway.stop)


@pytest.fixture(scope="module")
def site(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(redis_server.url, tmp_path_factory.mktemp("page"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, site: Site) -> Iterator[Browser]:
    """The page, fresh.  A test after which the console has an error, or that violated the policy, fails."""
    site.engine.fake.step_s = 0.001
    window.open(site.url)
    window.faults()
    window.until(lambda: window.text(".model option") == "tiny")
    yield window
    site.engine.fake.step_s = 0.001
    assert window.faults() == []


def stored(page: Browser) -> dict[str, Any]:
    """Return the open chat as the tab stores it."""
    page.script("dispatchEvent(new Event('pagehide'))")  # what is not stored yet is stored now
    text = page.script("return sessionStorage['quire.chat.' + JSON.parse(sessionStorage['quire.chats']).open]")
    return json.loads(text) if text else {"nodes": {}}


def last_answer(page: Browser, state: str = "done") -> dict[str, Any]:
    """Return the newest answer as soon as it is in a state."""

    def found() -> dict[str, Any] | None:
        answers = [node["answer"] for node in stored(page)["nodes"].values() if node["role"] == "assistant"]
        return answers[-1] if answers and answers[-1]["state"] == state else None

    answer = page.until(found)
    assert answer is not None
    return answer


def begin_long(page: Browser, site: Site) -> None:
    """Ask for an answer that takes many seconds, and wait for its first words."""
    site.engine.fake.step_s = 0.02
    page.send("long", Keys.ENTER)
    page.until(lambda: "5 6" in page.text(".text"))


def test_a_chat_streams_and_shows_markdown_and_figures(page: Browser) -> None:
    paint = page.script("return performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)")
    print("first paint, ms after the navigation began:", paint)
    page.send("Please, markdown", Keys.ENTER)
    answer = last_answer(page)
    assert answer["choices"][0]["text"] == MARKDOWN.rstrip("\n") or answer["choices"][0]["text"] == MARKDOWN
    page.until(lambda: "first token after" in page.text(".figures"))
    assert "tokens/s" in page.text(".figures")
    assert page.text(".bubble") == "Please, markdown"
    assert [
        one.tag_name for one in page.all(".text h3, .text strong, .text em, .text ol ul li, .text td, .text pre")
    ] == [
        *("h3", "strong", "em", "li", "td", "td", "pre"),
    ]
    assert 'print("<b>not bold</b>")' in page.text(".text pre")
    assert page.one(".text a").get_attribute("href") == "https://example.com/a?b=1&c=2"
    assert page.one(".text a").get_attribute("rel") == "noopener noreferrer"
    assert not page.driver.get_cookies()


def test_escape_stops_an_answer_and_the_engine(page: Browser, site: Site) -> None:
    begin_long(page, site)
    page.send(Keys.ESCAPE)
    answer = last_answer(page, "stopped")
    assert "Stopped" in page.text(".answer .state")
    page.until(lambda: any(order.startswith(answer["requestId"]) for order in site.engine.fake.aborted))
    page.send("Onwards", Keys.ENTER)
    page.until(lambda: "You said Onwards" in page.text(".text"))


def test_a_reload_goes_on_and_marks_the_pause(page: Browser, site: Site) -> None:
    begin_long(page, site)
    page.driver.refresh()
    page.until(lambda: "page reloaded" in (page.one(".pause").get_attribute("title") or ""))
    site.engine.fake.step_s = 0.001
    answer = last_answer(page)
    assert answer["choices"][0]["text"] == SAYS["long"]
    assert len(site.engine.fake._running) == 0


def test_a_lost_connection_is_resumed(page: Browser, site: Site) -> None:
    """The first stream breaks off after some events; the answer resumes from there."""
    page.script(
        """
        const real = window.fetch;
        window.fetch = async (url, options) => {
          const response = await real(url, options);
          if (options.method !== 'POST') return response;
          window.fetch = real;
          const reader = response.body.getReader();
          let left = 20;
          return new Response(new ReadableStream({
            async pull(sink) {
              const { value } = await reader.read();
              if (left--) sink.enqueue(value);
              else { reader.cancel(); sink.error(new TypeError('network error')); }
            },
          }), { headers: response.headers });
        };
        """
    )
    site.engine.fake.step_s = 0.01
    page.send("long", Keys.ENTER)
    page.until(lambda: "connection lost" in (page.one(".pause").get_attribute("title") or ""))
    site.engine.fake.step_s = 0.001
    assert last_answer(page)["choices"][0]["text"] == SAYS["long"]


AT_EVERY_PLACE = """
const [text, done] = arguments;
import(new URL('web/markdown.js', document.baseURI)).then(({ showMarkdown }) => {
  const shown = (pauses) => {
    const box = document.createElement('div');
    showMarkdown(box, text, pauses);
    const marks = [...box.querySelectorAll('.pause')];
    marks.forEach((mark) => mark.remove());
    return [marks.length, box.innerHTML.replace(/\\s+/g, ' ').replace(/ (?=<)/g, '').trim()];
  };
  const wanted = shown([])[1];
  const wrong = [];
  for (let at = 0; at <= text.length; at++) {
    const [marks, found] = shown([{ at, ms: 1500, why: 'engine silent' }]);
    if (marks !== 1 || found !== wanted) wrong.push([at, marks, found]);
  }
  done(wrong);
}, (error) => done(String(error)));
"""


def test_a_pause_at_any_place_changes_nothing_else(page: Browser) -> None:
    assert page.driver.execute_async_script(AT_EVERY_PLACE, MARKDOWN) == []


def test_regenerate_and_edit_make_branches(page: Browser) -> None:
    page.send("first", Keys.ENTER)
    page.until(lambda: "You said first" in page.text(".text"))
    page.button("Regenerate").click()
    page.until(lambda: "2 of 2" in page.text(".answer .versions"))
    last_answer(page)
    page.button("Edit").click()
    editor = page.one(".editor textarea")
    editor.clear()
    editor.send_keys("second")
    page.button("Send as a new branch").click()
    page.until(lambda: "You said second" in page.text(".text"))
    assert "2 of 2" in page.text(".question .versions")
    page.button("Previous version", ".question").click()
    page.until(lambda: "You said first" in page.text(".text"))
    assert "You said second" not in page.text(".text")
    branches = ["assistant"] * 3 + ["user"] * 2
    page.until(lambda: sorted(node["role"] for node in stored(page)["nodes"].values()) == branches)


def test_several_answers_side_by_side(page: Browser, site: Site) -> None:
    page.button("Settings").click()
    page.one("[name=n]").send_keys("2")
    page.one("[name=temperature]").send_keys("0.5")
    page.one("[name=stop]").send_keys("zzz")
    page.send("both", Keys.ENTER)
    page.until(lambda: "Answer 0" in page.text(".text") and "Answer 1" in page.text(".text"))
    answer = last_answer(page)
    assert (answer["body"]["n"], answer["body"]["temperature"], answer["body"]["stop"]) == (2, 0.5, ["zzz"])
    page.button("Continue with this", "[aria-label='Answer 2']").click()
    page.send("more", Keys.ENTER)
    page.until(lambda: "You said more" in page.text(".text"))
    asked = last_answer(page)["body"]["messages"]
    assert asked[1] == {"role": "assistant", "content": "You said both. Answer 1."}


def test_other_fields_must_be_json(page: Browser, site: Site) -> None:
    page.button("Settings").click()
    page.one("[name=extra]").send_keys('{"tools": [')
    seen = len(site.engine.fake.seen)
    page.send("nothing", Keys.ENTER)
    page.until(lambda: page.text(".wrong"))
    assert not page.all(".question")
    assert len(site.engine.fake.seen) == seen


def test_a_key_is_asked_for_and_kept_by_the_tab_alone(page: Browser, site: Site) -> None:
    """Under a path prefix, without the slash at its end."""
    page.driver.get(site.guarded)
    page.until(lambda: page.all("dialog[open]"))
    assert page.driver.current_url == site.guarded + "/"
    box = page.one("dialog input")
    box.send_keys("wrong", Keys.ENTER)
    page.until(lambda: "valid 'Bearer' key" in page.text("dialog[open]"))
    box = page.one("dialog input")
    box.clear()
    box.send_keys(KEY, Keys.ENTER)
    page.until(lambda: page.text(".model option") == "tiny")
    page.send("secret", Keys.ENTER)
    page.until(lambda: "You said secret" in page.text(".text"))
    assert page.script("return [...Object.values(localStorage)].join() + document.cookie") == ""
    assert page.script("return sessionStorage['quire.key']") == KEY
    faults = page.faults()
    assert len(faults) == 2, faults  # one for each refusal
    assert all("401" in fault for fault in faults), faults


def test_the_keyboard_does_it_all(page: Browser, site: Site) -> None:
    page.send("one", Keys.SHIFT + Keys.ENTER, Keys.NULL, "two")
    assert page.one("#message").get_attribute("value") == "one\ntwo"
    page.send(Keys.ENTER)
    page.until(lambda: "You said two" in page.text(".text"))
    order: list[str] = []
    page.script("document.activeElement.blur()")
    for _ in range(60):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        name = page.script("return document.activeElement.textContent.trim() || document.activeElement.id")
        order.append(name.split("\n")[0])
        if name == "message":
            break
    places = [order.index(name) for name in ("Engine", "New chat", "Edit", "Regenerate", "message")]
    assert places == sorted(places), order
    page.send(Keys.CONTROL + Keys.SHIFT + "o")
    page.until(lambda: page.all(".welcome"))
    assert len(page.all("nav li")) == 2
    assert page.script("return document.activeElement.id") == "message"


def test_every_control_has_a_name(page: Browser) -> None:
    page.send("tools", Keys.ENTER)
    last_answer(page)
    for panel in ("Settings", "Engine"):
        page.button(panel).click()
        tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        roles = {"button", "textbox", "combobox", "checkbox", "spinbutton", "image", "dialog", "navigation", "main"}
        controls = [node for node in tree if node["role"]["value"] in roles and not node["ignored"]]
        assert len(controls) > 10
        assert [node for node in controls if not node["name"]["value"].strip()] == []
    page.faults()  # this gateway may have no state of engines to show


def test_nothing_in_an_answer_executes(page: Browser) -> None:
    page.send("hostile", Keys.ENTER)
    answer = last_answer(page)
    assert answer["choices"][0]["text"].endswith("end")
    page.until(lambda: "end" in page.text(".text"))
    assert (
        page.all(".text script, .text img, .text svg, .text iframe, .text style, .text [onerror], .text [onload]") == []
    )
    links = [one.get_attribute("href") or "" for one in page.all(".text a")]
    assert links
    assert all(one.startswith("https://") for one in links), links
    assert (
        page.script(
            "return [...document.querySelectorAll('.text *')].flatMap((one) => one.getAttributeNames())"
            ".filter((name) => !['href', 'target', 'rel', 'class', 'title', 'start'].includes(name))"
        )
        == []
    )
    page.send("<img src=x onerror=hacked=true>", Keys.ENTER)
    page.until(lambda: len(page.all(".answer")) == 2)
    last_answer(page)
    assert page.all(".bubble img, .text img, nav img") == []


def test_a_chat_is_exported_and_the_theme_changes(page: Browser) -> None:
    page.send("keep", Keys.ENTER)
    last_answer(page)
    page.script(
        "const real = URL.createObjectURL.bind(URL);"
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.exported = text)); return real(blob); }"
    )
    page.button("Export").click()
    exported = json.loads(page.until(lambda: page.script("return window.exported")))
    assert exported["model"] == "tiny"
    assert [node.get("text") for node in exported["nodes"].values()] == ["keep", None]
    colours = []
    for theme in ("auto", "light", "dark"):
        page.until(lambda: page.script("return document.documentElement.dataset.theme") == theme)  # noqa: B023
        colours.append(page.script("return getComputedStyle(document.body).backgroundColor"))
        page.button(f"Theme: {theme}").click()
    assert colours[1] != colours[2]


def test_tool_calls_and_reasoning_are_shown(page: Browser) -> None:
    page.button("Settings").click()
    page.one("[name=extra]").send_keys(json.dumps(TOOL))
    page.send("tools", Keys.ENTER)
    answer = last_answer(page)
    page.until(lambda: "weather" in page.text(".call strong"))
    assert answer["choices"][0]["finish"] == "tool_calls"
    assert "onerror" in page.text(".call pre")
    details = page.one(".reasoning")
    assert details.get_attribute("open") is None
    page.one(".reasoning summary").click()
    assert page.text(".reasoning .pre") == "They ask about <b>rain</b>."


def test_the_token_view_shows_alternatives(page: Browser) -> None:
    page.send("odds", Keys.ENTER)
    last_answer(page)
    page.button("Tokens").click()  # asks again, with probabilities
    answer = page.until(lambda: next(iter(page.all(".tokens .token")), None))
    assert answer is not None
    assert last_answer(page)["body"]["top_logprobs"] == 5
    page.script("document.querySelector('.token').focus()")
    page.until(lambda: "61 %" in page.text(".alternatives caption"))
    assert len(page.all(".alternatives tr")) == 5
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.script("return document.activeElement.dataset.at") == "1"


def test_the_beams_of_a_search_are_a_tree(page: Browser) -> None:
    """What answers begin with alike is drawn once; the best one is the answer until another is picked."""
    page.button("Settings").click()
    page.one("[name=beam_width]").send_keys("3")
    page.send("search", Keys.ENTER)
    answer = last_answer(page)
    assert answer["body"]["beam_width"] == answer["body"]["n"] == 3
    assert "stream_options" not in answer["body"]
    assert [choice["text"] for choice in answer["choices"]] == list(BEAMS)
    runs = page.script("return [...document.querySelectorAll('.beams .run')].map((run) => run.textContent)")
    assert len(runs) == 5
    assert runs[0] + runs[1] + runs[2] == BEAMS[0]
    assert runs[0] + runs[1] + runs[3] == BEAMS[1]
    assert runs[0] + runs[4] == BEAMS[2].replace("\n", "\u21b5")
    nested = page.script("return [...document.querySelectorAll('.beams ul ul .run')].map((run) => run.textContent)")
    assert nested == runs[2:4]
    assert "61 %" in page.text(".beams .note")
    assert next(line for line in page.text(".beams").splitlines() if "score" in line).startswith("1. score -0.5")
    assert page.text(".answer .text").strip() == BEAMS[0]
    page.script("document.querySelectorAll('.beams button')[1].click()")
    page.until(lambda: page.text(".answer .text").strip() == BEAMS[1])
    page.send("and then", Keys.ENTER)
    page.until(lambda: len(page.all(".question")) == 2)
    messages = last_answer(page)["body"]["messages"]
    assert messages[-2] == {"role": "assistant", "content": BEAMS[1]}


def test_a_search_that_is_stopped_stays_so(page: Browser, site: Site) -> None:
    """Its answers are not streamed, so the page has no id to cancel and closes the connection."""
    page.button("Settings").click()
    page.one("[name=beam_width]").send_keys("2")
    site.engine.fake.step_s = 0.1
    page.send("search", Keys.ENTER)
    page.until(lambda: page.text(".state") == "Waiting for the whole answer")
    page.button("Stop").click()
    assert last_answer(page, "stopped")["requestId"] is None
    page.until(lambda: not site.engine.fake._running)
    site.engine.fake.step_s = 0.001
    page.one("[name=beam_width]").send_keys(Keys.BACKSPACE)
    page.send("Onwards", Keys.ENTER)
    page.until(lambda: "You said Onwards" in page.text(".text"))
    states = [node["answer"]["state"] for node in stored(page)["nodes"].values() if node["role"] == "assistant"]
    assert states[0] == "stopped"
    assert not page.all(".beams")


@pytest.mark.parametrize("guarded", [False, True])
def test_the_reference_shows_every_endpoint_and_field(window: Browser, site: Site, guarded: bool) -> None:
    """Without a key it shows the same, and names the endpoints that need one."""
    url = site.guarded + "/" if guarded else site.url
    with urllib.request.urlopen(f"{url}openapi.json") as response:
        api = json.load(response)
    window.driver.get(f"{url}docs")
    window.until(lambda: "Endpoints" in window.text("h1"))
    assert window.driver.title == "Quire API"
    assert len(window.all("header")) == 1
    titles = [f"{method.upper()} {path}" for path, methods in api["paths"].items() for method in methods]
    assert window.text("h2").splitlines() == titles + list(api["components"]["schemas"])
    assert window.text("nav a").splitlines() == titles
    fields = [name for schema in api["components"]["schemas"].values() for name in schema["properties"]]
    assert window.text("section > table > tr > th[scope=row]").splitlines() == fields
    chat = " ".join(window.text("section[aria-labelledby=ChatBody] table").split())
    assert "temperature number or null number: >= 0 and <= 2" in chat
    assert "messages array of Message Required." in chat
    assert ("Needs an API key." in window.text("#postV1ChatCompletions + p")) == guarded
    assert "Body: ChatBody. Answer: application/json or text/event-stream." in window.text("main")
    window.script("document.querySelector('a[href=\"#StreamOptions\"]').click()")
    window.until(
        lambda: window.script("return document.getElementById('StreamOptions').getBoundingClientRect().top") < 860
    )
    themes = []
    for theme in ("light", "dark"):
        window.script("localStorage['quire.theme'] = arguments[0]", theme)
        window.driver.refresh()
        window.until(lambda: "Endpoints" in window.text("h1"))
        themes.append(window.script("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(themes)) == 2
    assert window.faults() == []


ANSWERING = """
const real = window.fetch;
window.fetch = (url, options) => {
  if (!String(url).endsWith(arguments[0])) return real(url, options);
  if (arguments[1]) return Promise.resolve(new Response(arguments[3], { status: arguments[1], headers: arguments[2] }));
  const body = new ReadableStream({ start: (sink) => (window.sink = sink) });
  return Promise.resolve(new Response(body, { headers: arguments[2] }));
};
window.feed = (text) => window.sink.enqueue(new TextEncoder().encode(text));
"""


def test_the_wait_in_the_late_lane_counts_down(page: Browser) -> None:
    page.script(
        ANSWERING, "chat/completions", 0, {"x-queue-lane": "late", "x-queue-place": "12", "x-queue-wait": "500"}
    )
    page.send("wait", Keys.ENTER)
    page.until(lambda: "late lane: 12 ahead, about 4" in page.text(".state"))
    page.script("feed(': queued place=3 wait_s=300.0\\n')")
    page.until(lambda: "late lane: 3 ahead, about 2" in page.text(".state"))
    page.script("sink.close()")


def test_a_429_is_shown_as_it_is(page: Browser) -> None:
    body = {"error": {"message": "the wait <b>would</b> be 90 s", "code": "rate_limit_exceeded"}}
    page.script(ANSWERING, "chat/completions", 429, {"retry-after": "40"}, json.dumps(body))
    page.send("wait", Keys.ENTER)
    page.until(lambda: "429 rate_limit_exceeded" in page.text(".error"))
    assert "the wait <b>would</b> be 90 s" in page.text(".error")
    assert "Try again (the server says in" in page.text(".error")


def state(full: bool, **engine: Any) -> str:
    event = {
        "t": 1_700_000_000_000,
        "full": full,
        "lanes": {"on_time": 2, "late": 7},
        "engines": [{"engine": "e0", **engine}],
    }
    return f"data: {json.dumps(event)}\n\n"


def test_the_engine_panel_shows_load_and_blocks(page: Browser) -> None:
    name = "chatcmpl-<img src=x onerror=hacked=true>.0.0"
    page.script(ANSWERING, "engine/state", 0, {})
    page.button("Engine").click()
    figures = {"blocks": 100, "running": 3, "swapped": 1, "preemptions": 5, "tokens": 10, "peak_blocks": 60}
    figures |= {"jumped": 2, "drafted": 8, "accepted": 3, "refused": 6}
    cells = [[4, 3, 2], [10, 2, 1], [6, 1, 0], [80, 0, 0]]
    seqs = [[name, [[0, 4], [4, 5]]], ["other.0.0", [[0, 4], [9, 5]]]]
    page.until(lambda: page.script("return !!window.sink"))
    page.script("feed(arguments[0])", state(True, **figures, cells=cells, seqs=seqs))
    page.until(lambda: "shared 4" in page.text(".legend"))
    tiles = "Running 3 Waiting, on time 2 Waiting, late 7 Swapped 1 Preemptions 5 Tokens/s 0"
    drafts = "Tokens per step 2.00 Drafts accepted 38 % of 8 Drafts refused 6"  # 10 tokens in 10 - 2 - 3 steps
    assert " ".join(page.text(".tiles").split()) == f"{tiles} {drafts}"
    assert "14 % in use" in page.text("aside")
    assert "forecast peak 60" in " ".join(page.text("aside").split())
    page.one("canvas.map").send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.text(".pointed") == f"Block 0: shared by 2: {name}, other.0.0")
    changed = state(False, running=1, changed=[[0, 4, 2, 1]], seqs=[["other.0.0", 1, [[9, 6]]]], gone=[name])
    page.script("feed(arguments[0])", changed)
    page.until(lambda: "shared 0" in page.text(".legend") and "owned 14" in page.text(".legend"))
    page.until(lambda: page.text(".seqs li") == "other.0.0 10 blocks")
    assert page.text(".pointed") == "Block 0: owned: other.0.0"
    pixel = (
        "const c = document.querySelector('canvas.map'); return [...c.getContext('2d').getImageData(%d, 3, 1, 1).data]"
    )
    owned, free = page.script(pixel % 17), page.script(pixel % (20 * page.script("return 14")))
    assert owned != free
    page.button("Engine").click()
    page.until(lambda: not page.all("canvas"))


@pytest.mark.system
@pytest.mark.usefixtures("warm_processes")
def test_an_answer_survives_its_engine(window: Browser, site: Site, tmp_path: Path) -> None:
    """Real processes: the only engine is killed, a new one continues, and the page shows where it paused."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    words = ("serve", str(site.model), f"--port={port}", "--served-name=tiny", "--no-spare")
    scripted = ("--executor=scripted", "--scripted-step-ms=40", "--max-model-len=2048")
    process = Process(tmp_path / "serve.log", *words, *scripted)
    with ending([process]):
        wait_until_ready(url.rstrip("/"), 100)
        window.open(url)
        window.until(lambda: window.text(".model option") == "tiny")
        window.button("Settings").click()
        window.one("[name=seed]").send_keys("7")
        window.one("[name=max_tokens]").send_keys("450")  # 18 s, so that the kill comes before the end
        window.one("[name=extra]").send_keys('{"ignore_eos": true}')
        window.send("survive", Keys.ENTER)
        window.until(lambda: "tokens/s" in window.text(".figures"))
        engine_processes(psutil.Process(process.popen.pid))[0].kill()
        window.until(lambda: "Paused for" in window.text(".state"))
        window.until(lambda: "engine silent" in (window.one(".pause").get_attribute("title") or ""))
        answer = last_answer(window)
        with urllib.request.urlopen(f"{url}v1/streams/{answer['requestId']}", timeout=patience(100)) as response:
            events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert answer["choices"][0]["text"] == "".join(deltas)
        assert answer["choices"][0]["tokens"] == 450
        assert window.faults() == []
