"""`quire chat`: a conversation in a terminal, or the answer as plain text to one message from a pipe.

Ctrl-C cancels the current answer, also in the server.  Ctrl-C or Ctrl-D at the prompt ends the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.status import Status

from quire.engine.common import settings
from quire.engine.common.errors import OperatorError
from quire.service.terminal import options, server
from quire.service.terminal.conversation import Answer, Ended, Event, Lost, Piece, Waits
from quire.service.terminal.options import ChatConfig
from quire.service.terminal.wrapping import Wrapper

PROG = "quire chat"
PROMPT = "> "
FAILED = 1  # exit status if the answer to piped input is missing or incomplete
LEFT = 130  # exit status if Ctrl-C stopped the answer to piped input


class Outcome(msgspec.Struct):
    """The outcome of one answer."""

    text: str = ""  # the answer without its reasoning
    error: str = ""  # one line; "": none
    stopped: bool = False  # whether Ctrl-C stopped it


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command.  Returns the exit status."""
    config = settings.load(ChatConfig, words, options.environment(environ), prog=PROG, positional="url")
    if sys.stdin.isatty():
        options.heed_interrupts()
    try:
        with asyncio.Runner() as runner:
            return Chat(config, runner).run()
    except OperatorError as error:
        settings.stop(PROG, str(error), error.exit_status)
    except KeyboardInterrupt:
        return LEFT


class Chat:
    """The conversation so far, and the terminal."""

    def __init__(self, config: ChatConfig, runner: asyncio.Runner) -> None:
        self._config, self._runner = config, runner
        self._base = server.base_url(config.url)
        server.headers(config.api_key)  # refuses an invalid key before anything is sent
        self._console = Console(highlight=False)
        self._live = self._console.is_terminal
        self._model = ""
        self._messages: list[dict[str, str]] = []
        if config.system:
            self._messages.append({"role": "system", "content": config.system})

    def run(self) -> int:
        """Answer messages from the terminal, or one from a pipe.  Raises ServerError if the server offers no model."""
        self._model = self._runner.run(self._choose_model())
        if not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                settings.stop(PROG, "there is no message on the standard input")
            outcome = self._ask(message)
            return FAILED if outcome.error else LEFT if outcome.stopped else 0
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (after it, input() has line editing and a history)
        self._note(f"{self._model} at {self._base}. Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                message = input(PROMPT)
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return 0
            if message.strip():
                self._ask(message)

    async def _choose_model(self) -> str:
        async with server.session(self._config.api_key) as client:
            cards = await server.model_cards(client, self._base)
        return str(server.choose_model(self._base, cards, self._config.model)["id"])

    def _ask(self, message: str) -> Outcome:
        """Send a message, show the answer, and add both to the conversation."""
        self._messages.append({"role": "user", "content": message})
        outcome = self._runner.run(self._answer())
        if outcome.text:
            self._messages.append({"role": "assistant", "content": outcome.text})
        else:
            self._messages.pop()
        if outcome.error:
            print(f"{PROG}: {outcome.error}", file=sys.stderr, flush=True)
        return outcome

    async def _answer(self) -> Outcome:
        """Show one answer while it streams.  Ctrl-C ends it early."""
        outcome, view = Outcome(), View(self._console, live=self._live)
        async with server.session(self._config.api_key) as client:
            answer = Answer(client, self._base, self._config, self._model)
            try:
                async with contextlib.aclosing(answer.stream(self._messages)) as events:
                    async for event in events:
                        view.show(event)
                        if isinstance(event, Piece) and not event.reasoning:
                            outcome.text += event.text
            except server.ServerError as error:
                outcome.error = str(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                outcome.stopped = True
                view.clear()
                await answer.stop()
            finally:
                view.close(stopped=outcome.stopped)
        return outcome

    def _note(self, text: str) -> None:
        if self._live:
            self._console.out(server.printable(text), style="dim", highlight=False)


class View:
    """Shows the events of one answer."""

    def __init__(self, console: Console, *, live: bool) -> None:
        """`live`: whether the console is a terminal.  Then reasoning, queue position and times are shown, too."""
        self._console, self._live = console, live
        self._style = ""
        self._wrapper = Wrapper(console.width if live else 0, self._write)
        self._status: Status | None = None
        self._begun = time.monotonic()
        self._first: float | None = None
        self._empty = True
        if live:
            self._set_status("waiting for the first token")

    def show(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Piece):
            self._first = self._first or time.monotonic()
            if not (event.reasoning and not self._live):
                self._show_text(server.printable(event.text), "dim" if event.reasoning else "")
        elif isinstance(event, Waits):
            self._set_status(queued(event))
        elif isinstance(event, Lost):
            self._wrapper.flush()
            self._inline(f" [connection lost: {event.why}; resuming] ")
        else:
            self._show_end(event)

    def _show_text(self, text: str, style: str) -> None:
        self.clear()
        if style != self._style:
            self._wrapper.flush()
            if not self._empty:
                self._write("\n" if self._wrapper.at_line_start else "\n\n")
                self._wrapper = Wrapper(self._console.width if self._live else 0, self._write)
            self._style = style
        self._empty = False
        self._wrapper.feed(text)

    def _show_end(self, event: Ended) -> None:
        self._wrapper.flush()
        now, first = time.monotonic(), self._first
        parts = []
        if event.tokens is not None:
            parts.append(f"{event.tokens} tokens")
        if first is not None:
            parts.append(f"first after {first - self._begun:.2f} s")
            if event.tokens is not None and event.tokens > 1 and now > first:
                parts.append(f"{(event.tokens - 1) / (now - first):.1f} tokens/s")
        if event.finish not in ("", "stop"):
            parts.append(f"ended by {server.printable(event.finish)}")
        self._inline("\n" + ", ".join(parts))

    def clear(self) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def close(self, *, stopped: bool) -> None:
        """End the answer's last line."""
        self.clear()
        self._wrapper.flush()
        if stopped:
            self._inline(" [stopped]")
        if self._live or not self._empty:
            self._console.print()

    def _inline(self, text: str) -> None:
        """Write a dim remark into the text, on a terminal only."""
        self.clear()
        if self._live:
            self._console.out(server.printable(text), style="dim", highlight=False, end="")

    def _set_status(self, text: str) -> None:
        if not self._live:
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def _write(self, text: str) -> None:
        self._console.out(text, style=self._style or None, highlight=False, end="")
        self._console.file.flush()


def queued(event: Waits) -> str:
    """Return a line with a waiting request's place and estimated wait."""
    estimate = "" if event.wait_s is None else f", about {event.wait_s:.0f} s"
    return f"waiting in the late lane: {event.place} requests ahead{estimate}"
