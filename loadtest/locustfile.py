"""Users for Locust (closed loop): each waits for its answer before it sends its next request.

    python -m locust -f loadtest/locustfile.py --headless --host URL --users 20 --run-time 120 [--load-shape burst]
    python -m locust -f loadtest/locustfile.py Chat Rag --host URL     # only these kinds, with Locust's own page

Each kind of user has its own entries: ttft, itl, e2e in milliseconds, "refused 429", "failed".  ttft counts from the
first attempt, pauses included; itl is the time between events.

Users of a slower server send fewer requests, so the load shrinks, as with real users.  So percentiles under overload
are measured with `python -m quire.loadtest replay`, an open loop.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any, ClassVar

import gevent
from locust import FastHttpUser, LoadTestShape, between, events, task
from locust.argument_parser import LocustArgumentParser

from quire.loadtest.answers import Answer, announced_pause, pause
from quire.loadtest.replay import WORDS
from quire.loadtest.stats import REFUSED
from quire.loadtest.trace import lognormal
from quire.loadtest.workloads import MEANS, users_at

SYSTEM_WORDS, DOCUMENT_WORDS, DOCUMENTS, TURNS = 300, 2000, 8, 6
_numbers = itertools.count()


def _add_arguments(parser: LocustArgumentParser, **_: Any) -> None:
    group = parser.add_argument_group("Quire's users")
    group.add_argument(
        "--load-shape", choices=("steady", "ramp", "burst", "soak"), default="steady", help="users over time"
    )
    group.add_argument("--base-seconds", type=float, default=30.0, help="length of a ramp, or seconds before a burst")
    group.add_argument("--retry", choices=("obey", "ignore", "never"), default="obey", help="reaction to 429 and 503")
    group.add_argument("--model-name", default="", help="model to request; default: the first that the server lists")
    group.add_argument("--scale", type=float, default=1.0, help="factor on all lengths; default 1")
    group.add_argument("--seed", type=int, default=0, help="seed of lengths and texts; default 0")


events.init_command_line_parser.add_listener(_add_arguments)  # type: ignore[no-untyped-call]


class Load(LoadTestShape):
    """The number of users over time: --load-shape, with --users as its base.

    Ends after --run-time; by default a soak ends after 4 hours."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options: Any = self.runner.environment.parsed_options  # type: ignore[union-attr]
        now: float = self.get_run_time()  # type: ignore[no-untyped-call]
        default = 4 * 3600 if options.load_shape == "soak" else 2 * options.base_seconds + 30
        if now >= (options.run_time or default):
            return None
        users = options.num_users or 1
        # All users of a burst start within a second.
        rate = 3 * users if options.load_shape == "burst" else options.spawn_rate or 1
        return users_at(options.load_shape, now, users, options.base_seconds), rate


def words(count: int, rng: random.Random) -> str:
    """Return `count` words, which are about as many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(max(1, count)))


class Person(FastHttpUser):
    """Sends a request, reads the stream, and starts again.  Each subclass defines one kind of request."""

    abstract = True
    wait_time = between(0.1, 1.0)
    network_timeout = 600.0
    _models: ClassVar[dict[str, str]] = {}  # host -> model

    def on_start(self) -> None:
        options: Any = self.environment.parsed_options
        self.retry, self.scale, seed = options.retry, options.scale, options.seed
        self.rng = random.Random(f"{seed}/{next(_numbers)}")
        prompt, output = (mean * self.scale for mean in MEANS["sharegpt"])
        self.lengths = lognormal(1000, prompt, output, self.rng.randrange(2**32))
        host = self.host or ""
        if not options.model_name and host not in self._models:
            with self.client.get("/v1/models", name="models", catch_response=True) as response:
                self._models[host] = response.json()["data"][0]["id"]
        self.model = options.model_name or self._models[host]

    def report(self, name: str, seconds: float, size: int = 0, error: Exception | None = None) -> None:
        """Add one entry to Locust's statistics."""
        self.environment.events.request.fire(
            request_type=type(self).__name__,
            name=name,
            response_time=seconds * 1000,
            response_length=size,
            exception=error,
            context={},
        )

    def send(self, path: str, body: dict[str, Any]) -> str:
        """Send one request, retry its refusals, and return the text that was received."""
        body = {
            "model": self.model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        began = time.perf_counter()
        for attempt in itertools.count():
            # Not entered as a context, so that Locust adds no entry of its own.
            response: Any = self.client.post(
                path, json=body, headers={"Accept-Encoding": "identity"}, stream=True, catch_response=True
            )
            status = response.status_code
            if status == 200:
                return self._read(response, began)
            if status not in REFUSED:
                reason = getattr(response, "error", None) if not status else response.text[:200]
                self.report("failed", time.perf_counter() - began, error=RuntimeError(f"{status}: {reason}"))
                return ""
            self.report(f"refused {status}", time.perf_counter() - began, len(response.content or b""))
            wait = pause(self.retry, attempt, announced_pause(response.headers, time.time()), self.rng)
            if wait is None:
                self.report("gave up", time.perf_counter() - began)
                return ""
            gevent.sleep(wait)
        raise AssertionError("unreachable")

    def _read(self, response: Any, began: float) -> str:
        answer = Answer()
        try:
            # Line by line: Locust's own iter_lines waits for 1,024 bytes, which are several events.
            while line := response.stream.readline(b"\n"):
                answer.feed(bytes(line), time.perf_counter() - began)
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            response.stream.release()
        took = time.perf_counter() - began
        if not answer.complete:
            self.report("failed", took, error=RuntimeError(answer.error or "the stream ended without [DONE]"))
            return ""
        text = "".join(answer.text)
        if answer.times:
            self.report("ttft", answer.times[0])
        for gap in answer.gaps:
            self.report("itl", gap)
        self.report("e2e", took, len(text))
        return text

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        return self.send("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})


class Completion(Person):
    """A new prompt each time."""

    weight = 3

    @task
    def complete(self) -> None:
        job = self.rng.choice(self.lengths)
        self.send("/v1/completions", {"prompt": words(job.prompt_len, self.rng), "max_tokens": job.output_len})


class Samples(Person):
    """Four sequences of one prompt, which share its blocks until they differ."""

    @task
    def sample(self) -> None:
        job = self.rng.choice(self.lengths)
        prompt = words(job.prompt_len, self.rng)
        self.send(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": max(1, job.output_len // 4), "n": 4, "temperature": 1.0},
        )


class Chat(Person):
    """One question after a system prompt that all chats share."""

    weight = 3

    def system(self) -> dict[str, str]:
        return {"role": "system", "content": words(round(SYSTEM_WORDS * self.scale), random.Random("system"))}

    @task
    def question(self) -> None:
        job = self.rng.choice(self.lengths)
        asked = {"role": "user", "content": words(job.prompt_len, self.rng)}
        self.chat([self.system(), asked], job.output_len)


class Rag(Person):
    """A short question about one of a few long documents, and a short answer."""

    @task
    def look_up(self) -> None:
        document = words(round(DOCUMENT_WORDS * self.scale), random.Random(self.rng.randrange(DOCUMENTS)))
        question = words(round(20 * self.scale), self.rng)
        self.chat([{"role": "user", "content": f"{document}\n\n{question}"}], max(1, round(80 * self.scale)))


class Agent(Chat):
    """A growing conversation: each turn's prompt starts with the complete previous turn, answer included."""

    weight = 1

    @task
    def question(self) -> None:
        messages = [self.system()]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": words(round(60 * self.scale), self.rng)})
            answer = self.chat(messages, max(1, round(80 * self.scale)))
            if not answer:
                return
            messages.append({"role": "assistant", "content": answer})
