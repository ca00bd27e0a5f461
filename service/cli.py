"""The `quire` command: start the other processes, and keep them running.  It imports none of them.

quire serve [MODEL]   Redis, one engine and some gateways under one supervisor, for one machine
quire gateway | engine   one process of a larger deployment, around a Redis of your own
quire quarantine         requests that are held back because they killed their engine
quire top | chat | bench   clients of a running server, for a terminal (service/terminal)
quire convert-tokenizer    a tokenizer.json for a checkpoint with only a SentencePiece model (engine/tokenizers)
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.engine.common import child_python, log_queue, settings
from quire.engine.common.addresses import host_and_port, local_url
from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.common.errors import OperatorError
from quire.engine.config import EngineConfig
from quire.engine.wire.gateway_side import GatewaySide
from quire.engine.wire.link import BusDown
from quire.service.common.container_init import leave_pid_1
from quire.service.common.included_models import find_model
from quire.service.config import GatewayConfig
from quire.service.supervisor import CONFIG_ERROR, Child, GivenUp, Interrupt, Supervisor
from quire.service.terminal.options import ClientEnvironment
from quire.service.text.tokenizer import served_name

USAGE = """usage: quire serve [MODEL] [options]   Redis, an engine and gateways on this machine
       quire gateway [MODEL] [options]  one gateway, around a Redis of your own
       quire engine [MODEL] [options]   one engine, around a Redis of your own
       quire quarantine list | show ID | drop ID   requests that killed their engine
       quire top URL [options]          engines, queue, latencies and tenants of a running server
       quire chat URL [options]         talk to a model
       quire bench URL [options]        a small load, and a table of latencies
       quire convert-tokenizer DIR      makes the tokenizer.json of a SentencePiece or tiktoken file
Each says more with --help."""

PROCESSES = {"gateway": "quire.service.app", "engine": "quire.engine"}  # command -> module
# command -> module.  These commands are clients: packages that only they need are imported when one is started.
CLIENTS = {name: f"quire.service.terminal.{name}" for name in ("top", "chat", "bench")}
CONVERTER = "convert-tokenizer"  # command of the module quire.engine.tokenizers.convert
# Settings that a gateway and its engine must agree on: given once, passed to both.
BOTH = {"model", "served_name", "namespace", "vllm_metrics", "log_format", "otlp_endpoint", "trace_sample"}
CHAT_TEMPLATE = "chat_template.jinja"  # file of a checkpoint with a chat template
ENGINE_GRACE_S = 5.0  # drain time of the engine; the gateways have ended, so the remaining requests have no client
ENGINE_STOP_S = 15.0  # seconds between SIGTERM and SIGKILL


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `quire serve` itself; it passes all others on."""

    gateways: Annotated[int, Meta(ge=1, le=256)] = 1
    """Gateway processes, all on one port."""
    redis_url: str = ""
    """redis://, rediss:// or unix:// URL. Empty: a private Redis that ends with this command."""
    spare: bool = True
    """Keep a second engine process that has imported and prepared everything but the weights. It takes over when the
    engine dies, many seconds sooner than a new process could. A fork server makes it; the two take 0.4 GB of memory,
    with tensor_parallel 0.4 GB more for each rank. See spare_on_gpu for what the spare holds on a GPU."""
    gateway_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds without a heartbeat of its event loop after which a gateway is killed and restarted. A pause of the
    machine does not count. 0: never. Raise it where gateways share few cores with other programs."""
    gateway_start_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds within which a gateway must be ready after its start; else it is killed and restarted. A pause of the
    machine does not count. 0: no limit. A start takes some seconds, far less than the default. Raise it where a
    tokenizer is read from a very slow disk."""
    data_dir: str = ""
    """Directory in which the private Redis keeps its queue across restarts. Empty: it is lost. Refused with
    redis_url."""


class EngineProgram(msgspec.Struct, frozen=True):
    """The engine that `quire serve` starts.  A study of the load tests starts an engine with more options."""

    words: tuple[str, ...] = ("-m", PROCESSES["engine"])  # command-line arguments of Python
    spare: tuple[str, ...] = ("-m", "quire.engine.process.fork_server")  # fork server of spare engines; (): none
    options: type[EngineConfig] = EngineConfig


ENGINE = EngineProgram()


class QuarantineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `quire quarantine`."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// or unix:// URL."""
    namespace: str = "quire"
    """Prefix of every Redis key."""


def main(argv: Sequence[str] | None = None, engine: EngineProgram = ENGINE) -> int:
    """Run the console script.  `engine`: the engine that `serve` starts.

    Returns the exit status: 0 after a drain, 1 if it gave up or a request failed, 2 for a bad command line."""
    command, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    rest = rest[:-1]  # "" replaces a missing command
    if (command == "serve" or command in PROCESSES) and (
        unknown := settings.unknown_variable(
            os.environ, (ServeConfig, GatewayConfig, engine.options, ClientEnvironment)
        )
    ):
        settings.stop(f"quire {command}", unknown, CONFIG_ERROR)
    if command == "serve" or command in PROCESSES:
        leave_pid_1()
    if command == "serve":
        return serve(rest, engine)
    if command == "quarantine":
        return quarantine(rest)
    if command in CLIENTS:
        return client(command, rest)
    if command == CONVERTER:
        return int(importlib.import_module("quire.engine.tokenizers.convert").main(rest))
    if command in PROCESSES:
        os.execve(sys.executable, child_python.command("-m", PROCESSES[command], *rest), child_python.environment())
    asked = command in ("-h", "--help")
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def client(command: str, words: Sequence[str]) -> int:
    """Run `quire top`, `chat` or `bench`.  Returns the exit status: 2 if a package that it needs is missing."""
    try:
        module = importlib.import_module(CLIENTS[command])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "quire":
            raise
        settings.stop(f"quire {command}", f"needs the package {missing}: pip install 'quire[cli]'", CONFIG_ERROR)
    status: int = module.main(words, dict(os.environ))
    return status


def split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split the arguments of `quire serve` into its own, the gateways' and the engine's.

    Arguments that neither `quire serve` nor a gateway knows go to the engine, which refuses unknown options.  All three
    get the option --config.  MODEL must be the first argument, so that an option's value is never taken for the model.
    """
    own: list[str] = []
    gateway: list[str] = []
    engine: list[str] = []
    words = list(argv)
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    while words:
        flag, given, _ = words[0].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        length, targets = 1, [engine]
        for cls, target in ((GatewayConfig, gateway), (ServeConfig, own)):
            fields = cls.__struct_fields__
            if name in fields:
                length = 1 if given or settings.is_bool(cls, name) else 2
            setting = name if name in fields else name.removeprefix("no_")
            if setting in fields:
                targets = [target, engine] if setting in BOTH else [target]
        if flag == "--config":
            length, targets = 1 if given else 2, [own, gateway, engine]
        for target in targets:
            target += words[:length]
        del words[:length]
    return own, gateway, engine


def serve(argv: Sequence[str], program: EngineProgram = ENGINE) -> int:
    """Run `quire serve` with this engine.  Returns the exit status."""
    prog = "quire serve"
    if "-h" in argv or "--help" in argv:
        print(f"usage: {prog} [MODEL] [options]   MODEL comes first; without one the demo model is served\n")
        print(f"{settings.describe(ServeConfig)}\n\nof the gateways:\n{settings.describe(GatewayConfig)}\n")
        print(f"of the engine:\n{settings.describe(program.options)}")
        return 0
    own_words, gateway_words, engine_words = split(argv)
    own = settings.load(ServeConfig, own_words, os.environ, prog=prog, table="serve", shared=BOTH)
    gateway = settings.load(GatewayConfig, gateway_words, os.environ, prog=prog, table="gateway")
    engine_config = settings.load(program.options, engine_words, os.environ, prog=prog, table="engine")
    check_options(prog, own, gateway)
    check_both(prog, gateway, engine_config)
    embedded: EmbeddedRedis | None = None
    try:
        interrupt = Interrupt()
        port = free_port(gateway.host, gateway.port)
        if own.redis_url:
            url = own.redis_url
        else:
            embedded = EmbeddedRedis(Path(own.data_dir).absolute() if own.data_dir else None)
            embedded.start()
            url = embedded.url
        asyncio.run(check_redis(url, gateway.namespace))
        with interrupt.raised_at_once():
            model = find_model(gateway.model)
        name = settings.process_name()  # the same for a restarted child: it gets its own requests again
        os.environ["QUIRE_REDIS_URL"] = url  # inherited; a flag would show its password to every user of the machine
        pages, engine_page = metrics_pages(gateway, own.gateways, engine_config.metrics_host)
        first = [f"--engine-id={name}", f"--grace-s={ENGINE_GRACE_S}"]  # defaults, which `engine_words` may override
        words = [*first, *engine_words, f"--model={model}", f"--metrics-port={pages[0]}"]
        spare = [*program.spare, *words] if own.spare and program.spare else []
        engine = Child("engine", [*program.words, *words], ENGINE_STOP_S, spare=spare)
        gateways = [
            Child(
                f"gateway {i}",
                ["-m", "quire.service.app", *gateway_words, *engine_page, f"--model={model}", f"--port={port}", *named],
                gateway.drain_s + 10,
                silence_s=own.gateway_timeout_s,
                start_s=own.gateway_start_s,
            )
            for i in range(own.gateways)
            for named in [(f"--gateway-id={gateway.gateway_id or name}-{i}", f"--metrics-port={pages[1 + i]}")]
        ]
        shown = gateway.served_name or served_name(model), example_of(model)
        supervise(Supervisor(engine, gateways, embedded, gateway.host, port, *shown), interrupt)
    except OperatorError as error:
        settings.stop(prog, str(error), 1)
    except KeyboardInterrupt:  # before the supervisor handles signals
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if embedded is not None:
            embedded.close()
    return 0


def check_options(prog: str, own: ServeConfig, gateway: GatewayConfig) -> None:
    """End with one line for options that `quire serve` cannot honour."""
    if gateway.uds:
        settings.stop(prog, "--uds: only `quire gateway` listens at a Unix socket")
    if own.redis_url and own.data_dir:
        settings.stop(prog, "--data-dir is of the private Redis, which --redis-url replaces: give one of them")


def check_both(prog: str, gateway: GatewayConfig, engine: EngineConfig) -> None:
    """End with one line if a config file gives gateway and engine different values of a shared option."""
    for name in sorted(BOTH):
        if (one := getattr(gateway, name)) != (other := getattr(engine, name)):
            settings.stop(prog, f"{name} is {one!r} in [gateway] and {other!r} in [engine]; give it before the tables")


def supervise(supervisor: Supervisor, interrupt: Interrupt) -> None:
    """Run the supervisor.  It continues even if the reader of its output stops reading."""
    with log_queue.installed():
        asyncio.run(supervisor.run(interrupt))


def metrics_pages(gateway: GatewayConfig, gateways: int, host: str) -> tuple[list[int], list[str]]:
    """Return the ports of the metrics pages, first the engine's, then the gateways', and arguments for the gateways.

    With --vllm-metrics and without --metrics-port, the gateways' API port also shows the engine's metrics, so that a
    dashboard reads one page."""
    if not gateway.vllm_metrics or gateway.metrics_port or gateway.engine_metrics:
        return [gateway.metrics_port + i if gateway.metrics_port else 0 for i in range(1 + gateways)], []
    port = free_port(host, 0)
    return [port] + [0] * gateways, [f"--engine-metrics={local_url(host, port)}/metrics"]


def free_port(host: str, port: int) -> int:
    """Return `port`, or a free port if it is 0.  Raises GivenUp when the port is in use.

    Gateways would not notice, because they share their port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore recently closed connections
            probe.bind(address)
            found: int = probe.getsockname()[1]
    except OSError as error:
        raise GivenUp(
            f"cannot listen on {host_and_port(host, port)}: {error.strerror}; choose another with --port"
        ) from None
    return found


def example_of(model: str) -> tuple[str, dict[str, Any]]:
    """Return endpoint and body of an example request: a chat if the checkpoint has a chat template file."""
    if Path(model, CHAT_TEMPLATE).is_file():
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        return "chat/completions", {"messages": messages, "temperature": 0}
    return "completions", {"prompt": "def main():", "max_tokens": 16, "stream": True}


async def check_redis(url: str, namespace: str) -> None:
    """Raise BusDown if Redis cannot be used, before a model is loaded."""
    bus = GatewaySide(url, "supervisor", namespace=namespace)
    try:
        await bus.open()
    finally:
        await bus.close()


def quarantine(words: Sequence[str]) -> int:
    """Run `list`, `show ID` or `drop ID` (`drop all`).  Prints a JSON line per request.  Returns 1 for unknown ids."""
    prog = "quire quarantine"
    action, *rest = [*words, ""]
    wanted = rest.pop(0) if action in ("show", "drop") else ""
    if action not in ("list", "show", "drop") or (action != "list" and (not wanted or wanted.startswith("-"))):
        print(USAGE, file=sys.stderr)
        return 2
    config = settings.load(QuarantineConfig, [word for word in rest if word], os.environ, prog=prog)

    async def run() -> int:
        bus = GatewaySide(config.redis_url, "quarantine", namespace=config.namespace)
        try:
            found = [one for one in await bus.operations.quarantined() if wanted in ("", "all", one.request.id)]
            for one in found:
                request = msgspec.to_builtins(one.request)
                if action == "list":
                    request["token_ids"] = f"{len(one.request.token_ids)} tokens"
                print(msgspec.json.encode({**msgspec.to_builtins(one), "request": request}).decode())
                if action == "drop":
                    await bus.operations.quarantined(drop=one.request.id)
        finally:
            await bus.close()
        return 0 if found or action == "list" or wanted == "all" else 1

    try:
        return asyncio.run(run())
    except BusDown as error:
        settings.stop(prog, str(error), 1)


if __name__ == "__main__":
    sys.exit(main())
