"""Settings: fill a frozen config struct from flags, environment, TOML file and defaults, in this order of precedence.

A field `max_seqs` of a struct is set by the flag `--max-seqs 64`, the variable `QUIRE_MAX_SEQS`, or the key `max_seqs`
of the file given with `--config`.  A bool is `--x` or `--no-x`, a list is comma-separated.  Types and limits come from
the struct's annotations.  The string below a field is its help text.

Keys before the file's first table apply to every program.  Keys for one program are in its table, `[serve]`,
`[gateway]` or `[engine]`; the other programs ignore that table.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import math
import os
import secrets
import socket
import sys
import textwrap
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from quire.engine.common.errors import OperatorError
from quire.engine.common.removed_options import advice, value_advice

C = TypeVar("C", bound=msgspec.Struct)


TABLES = ("serve", "gateway", "engine")  # sections of a file, one per program
PREFIX = "QUIRE_"


class SettingsError(OperatorError):
    """An invalid setting; the text names the option, its limit and the given value."""

    exit_status = 2


class Option(msgspec.Struct, frozen=True):
    """A field of a config struct, as shown in the help text and in the option pages."""

    name: str
    flag: str  # --max-seqs, --[no-]prefix-cache
    limits: list[str]  # conditions on the value, in words
    default: str
    description: str


def load(
    cls: type[C],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    positional: str | None = None,
    table: str = "",
    shared: Collection[str] = (),
) -> C:
    """Build `cls` from `argv` (without the program's name), `environ` and an optional file.

    `positional`: the field that may also be given without its flag.  `table`: the program's table in the file.
    `shared`: keys of other programs that are accepted before the tables.  Unknown QUIRE_ variables are ignored, because
    another process may use them; `unknown_variable` checks them.  On `--help` prints the options and exits with 0; on
    an invalid setting prints one line to stderr and exits with 2.
    """
    if any(word in ("-h", "--help") for word in argv):
        words = f" [{positional.upper()}]" if positional else ""
        print(f"usage: {prog}{words} [--config FILE.toml] [options]\n\n{describe(cls)}")
        raise SystemExit(0)
    try:
        return parse(cls, argv, environ, positional=positional, table=table, shared=shared)
    except SettingsError as error:
        stop(prog, str(error))


def stop(prog: str, reason: str, status: int = 2) -> NoReturn:
    """Print one line on stderr and exit, as every Quire program does when it cannot start."""
    print(f"{prog}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def parse(
    cls: type[C],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    positional: str | None = None,
    table: str = "",
    shared: Collection[str] = (),
) -> C:
    """Build `cls` like load(), but raise SettingsError instead of exiting."""
    flags, config = _read_flags(cls, argv, positional)
    types = typing.get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    if config is not None:
        for name, where, value in _read_file(config, table):
            if name in types:
                values[name] = _convert(value, types[name], f"{config}: {where}{name}", strict=True)
            elif where or name not in shared:
                others = "" if where or not table else "; what is for one program stands in its table, say [engine]"
                raise SettingsError(f"{config}: {where}{name} is not a setting{_meant(name, types) or others}")
    for name, kind in types.items():
        if (text := environ.get(variable := f"{PREFIX}{name.upper()}")) is not None:
            values[name] = _convert(_split(text, kind), kind, variable)
    for name, (flag, text) in flags.items():
        values[name] = _convert(_split(text, types[name]), types[name], flag)
    for field in msgspec.structs.fields(cls):
        if field.required and field.name not in values:
            raise SettingsError(f"{flag_of(field.name)} is required")
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:  # from __post_init__, which checks fields against each other
        raise SettingsError(str(error)) from None


def unknown_variable(environ: Mapping[str, str], programs: Sequence[type[msgspec.Struct]]) -> str | None:
    """Return an error line for a variable QUIRE_... that is no option of any of `programs`; None: all are options."""
    known = {f"{PREFIX}{name.upper()}": None for cls in programs for name in cls.__struct_fields__}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            return f"{variable} is not an option{_meant(variable, known)}"
    return None


def process_name() -> str:
    """Return a unique name for this process: host name, process id and a random part.

    The random part is needed because containers may share the host name, and each may have process id 1."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def flag_of(field: str) -> str:
    """Return the flag of a field: max_seqs -> --max-seqs."""
    return "--" + field.replace("_", "-")


def is_bool(cls: type[msgspec.Struct], field: str) -> bool:
    """Return whether the field is a bool, so that its flag takes no value."""
    return _plain(typing.get_type_hints(cls)[field]) is bool


def options(cls: type[msgspec.Struct]) -> list[Option]:
    """Return every field of `cls` as an Option, in order."""
    types, texts = typing.get_type_hints(cls, include_extras=True), descriptions(cls)
    found = []
    for field in msgspec.structs.fields(cls):
        kind = types[field.name]
        flag = f"--[no-]{field.name.replace('_', '-')}" if is_bool(cls, field.name) else flag_of(field.name)
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = "required" if field.required else _show(value)
        found.append(Option(field.name, flag, _limits(kind), default, texts.get(field.name, "")))
    return found


def descriptions(cls: type[msgspec.Struct]) -> dict[str, str]:
    """Return field -> the string below it in the source of `cls` or of a base, since Python itself drops the string."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        module = ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        [node] = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for field, below in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found


def describe(cls: type[msgspec.Struct]) -> str:
    """Return the help text for the options of `cls`, one paragraph each: flag, limits, default, description."""
    lines: list[str] = []
    for option in options(cls):
        default = option.default if option.default == "required" else f"default {option.default}"
        lines.append(f"  {option.flag}  ({', '.join([*option.limits, default])})")
        lines += textwrap.wrap(option.description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _read_flags(
    cls: type[msgspec.Struct], argv: Sequence[str], positional: str | None
) -> tuple[dict[str, tuple[str, str]], str | None]:
    """Return (field -> (flag as written, value text), file given with --config).

    The last of several equal flags wins."""
    fields = {flag_of(name): name for name in cls.__struct_fields__}
    found: dict[str, tuple[str, str]] = {}
    config: str | None = None
    words = iter(argv)
    for word in words:
        flag, given, text = word.partition("=")
        positive = "--" + flag.removeprefix("--no-")
        if not word.startswith("-"):
            if positional is None or positional in found:
                raise SettingsError(f"{word!r} is one argument too many")
            found[positional] = (positional.upper(), word)
        elif flag in fields and is_bool(cls, fields[flag]):
            found[fields[flag]] = (flag, text if given else "true")
        elif flag.startswith("--no-") and positive in fields and is_bool(cls, fields[positive]) and not given:
            found[fields[positive]] = (flag, "false")
        elif flag in fields or flag == "--config":
            if not given:
                text = next(words, "--")
                if text.startswith("--"):
                    raise SettingsError(f"{flag} needs a value")
            if flag == "--config":
                config = text
            else:
                found[fields[flag]] = (flag, text)
        else:
            raise SettingsError(f"{flag} is not an option{_meant(flag, fields)}")
    return found, config


def _read_file(path: str, table: str) -> list[tuple[str, str, Any]]:
    """Return (key, its table, value) of a file: first keys before the tables, then keys of `table`, which win."""
    try:
        with open(path, "rb") as file:
            read = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, numbers or nesting beyond Python's limits
        raise SettingsError(f"--config {path}: {error}") from None
    tables = {name: value for name, value in read.items() if isinstance(value, dict) or name in TABLES}
    for name, value in tables.items():
        if name not in TABLES:
            raise SettingsError(f"{path}: [{name}] is not a table{_meant(name, dict.fromkeys(TABLES))}")
        if not isinstance(value, dict):
            raise SettingsError(f"{path}: {name} is {_show(value)}; must be a table, [{name}]")
    common = [(name, "", value) for name, value in read.items() if name not in tables]
    return common + [(name, f"[{table}] ", value) for name, value in tables.get(table, {}).items()]


def _convert(value: object, kind: Any, source: str, *, strict: bool = False) -> Any:
    """Convert `value` to type `kind`.  Raises SettingsError.

    `source`: flag, variable, or file and key, for the error.  `strict`: do not accept a text as a number."""
    try:
        converted = msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        limits = ", ".join(_limits(kind))
        instead = value_advice(source.rsplit(" ", 1)[-1], value)
        raise SettingsError(
            f"{source} is {_show(value)}; must be {limits or str(error).lower()}{f': {instead}' if instead else ''}"
        ) from None
    if isinstance(converted, float) and not math.isfinite(converted):  # the bounds do not refuse NaN
        raise SettingsError(f"{source} is {value}; must be a finite number")
    return converted


def _split(text: str, kind: Any) -> str | list[str]:
    if typing.get_origin(_plain(kind)) is list:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _plain(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _limits(kind: Any) -> list[str]:
    """Return the conditions on a value in words, such as ["a whole number", ">= 1"]."""
    plain = _plain(kind)
    if typing.get_origin(plain) is typing.Literal:
        return ["one of " + " ".join(str(choice) for choice in typing.get_args(plain))]
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    limits = [names.get(plain, "a comma-separated list" if typing.get_origin(plain) is list else str(plain))]
    for meta in getattr(kind, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta):
            for sign, limit in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
                if limit is not None:
                    limits.append(f"{sign} {limit}")
            if meta.min_length is not None:
                limits.append(f"at least {meta.min_length} long")
            if meta.max_length is not None:
                limits.append(f"at most {meta.max_length} long")
            if meta.pattern is not None:
                limits.append(f"matching {meta.pattern}")
    return limits


def _show(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _meant(name: str, known: Mapping[str, object]) -> str:
    """Return the end of an error text: the replacement of a removed option, or the most similar option."""
    if (instead := advice(name)) is not None:
        return f" any more: {instead}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
