"""The Lua scripts: their keys are documented, their names are declared, and every server compiles them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import redis

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import scripts
from quire.engine.wire.scripts import SHARED, Script

WIRE = Path(scripts.__file__).parent
FOLDER = WIRE / "redis"
ALL = {name: value for name, value in vars(scripts).items() if isinstance(value, Script)}


def documented() -> set[str]:
    """Keys of the tables of KEYS.md up to their first placeholder ("queue:" for `queue:TENANT`), and their endings."""
    page = (FOLDER / "KEYS.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^\| key \|.*\n((?:\|.*\n)+)", page)
    keys = re.findall(r"(?m)^\| `([^`]+)`", "".join(tables))
    return {found for key in keys for found in re.findall(r"^[a-z_]+:?|:[a-z]+$", key)}


def lua_keys(source: str) -> set[str]:
    """Keys that a script makes from the prefix, up to their first colon, and endings it appends.

    Raises ValueError: a key is no literal."""
    code = re.sub(r"--.*", "", source).replace("local P = KEYS[1]", "")
    uses = [use.partition(":")[0] + ":" * (":" in use) for use in re.findall(r"\bP\b(?: \.\. '([^']+)')?", code)]
    if "" in uses:
        raise ValueError("P is used without a literal key")
    return {*uses, *re.findall(r"'(:[a-z]+)'", code)}


def python_keys(source: str) -> set[str]:
    """Keys that a Python module makes from the prefix, in commands and in scripts of its own."""
    return {key for pair in re.findall(r"prefix\}([a-z_]+:?)|\bP \.\. '([^']+)'", source) for key in pair if key}


def test_every_key_is_documented_and_every_documented_key_is_used() -> None:
    found = {path.name: lua_keys(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.lua")}
    found |= {path.name: python_keys(path.read_text(encoding="utf-8")) for path in WIRE.glob("*.py")}
    known = documented()
    undeclared = {name: keys - known for name, keys in found.items() if keys - known}
    assert not undeclared, "add them to engine/wire/redis/KEYS.md"
    assert known == set().union(*found.values()), "nothing uses the rest: remove it from engine/wire/redis/KEYS.md"


@pytest.mark.parametrize("mutant", ["call('DEL', P .. 'waitng')", "call('DEL', P .. 'heldd:' .. me)", "x(':logprob')"])
def test_an_undeclared_key_is_found(mutant: str) -> None:
    source = (FOLDER / "sync.lua").read_text(encoding="utf-8")
    assert lua_keys(source) <= documented()
    assert lua_keys(source + mutant) - documented()
    with pytest.raises(ValueError, match="literal"):
        lua_keys(source + "call('DEL', P .. name)")


def test_luacheckrc_knows_the_constants_and_the_shared_functions() -> None:
    config = (FOLDER / ".luacheckrc").read_text(encoding="utf-8")
    constants, shared = (
        re.findall(r'"(\w+)"', re.search(rf"local {name} = \{{(.*?)\n\}}", config, re.S)[1])  # type: ignore[index]
        for name in ("constants", "shared")
    )
    assert constants == list(scripts.constants())
    files = [(FOLDER / "shared" / f"{name}.lua").read_text(encoding="utf-8") for name in SHARED]
    assert shared == [name for file in files for name in re.findall(r"(?m)^local (?:function )?(\w+)", file)]
    assert {path.stem for path in FOLDER.glob("shared/*.lua")} == set(SHARED)
    assert [definition.name for definition in scripts.PRELUDE] == shared


def test_a_script_has_what_it_uses_and_no_more() -> None:
    """Redis makes each function of a script anew for each call.  luacheck finds what is missing (below)."""
    for name, script in ALL.items():
        for definition in scripts.used(script.source):
            assert script.source.count(definition.text) == 1, name
            rest = script.source.replace(definition.text, "")
            assert re.search(rf"\b{definition.name}\b", rest), f"{name}: {definition.name} is not used"
        assert not set(scripts.constants()) & set(re.findall(r"\w+", script.source)), name
    assert scripts.used("return 1") == []
    assert [one.name for one in scripts.used("return now_ms()")] == ["call", "NOW", "now_ms"]


def test_every_file_is_a_script_that_names_its_arguments_first() -> None:
    bodies = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.lua")}
    assert {script.source for script in ALL.values()} == {scripts.Script(body).source for body in bodies.values()}
    for name, body in bodies.items():
        if "ARGV" not in body:
            continue
        first = re.sub(r"(?m)^--.*\n", "", body).split("\n")[0]
        assert re.match(r"local [a-z_, ]+ = (unpack\(ARGV|ARGV)", first), f"{name}.lua: {first}"


@pytest.mark.every_redis
def test_the_server_compiles_every_script_under_our_digest(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        for name, script in ALL.items():
            assert client.script_load(script.source) == script.sha, name


@pytest.mark.skipif(shutil.which("luacheck") is None, reason="luacheck is not installed")
def test_luacheck_finds_nothing() -> None:
    luacheck = ["luacheck", "--no-color"]
    command = [*luacheck, "--config", str(FOLDER / ".luacheckrc"), str(FOLDER)]
    files = subprocess.run(command, capture_output=True, text=True, check=False)
    assert files.returncode == 0, files.stdout
    # Complete scripts: a shared function that uses one defined after it would read a global.
    names = ["--read-globals", "redis", "cmsgpack", "struct", "KEYS", "ARGV"]
    command = [*luacheck, "--no-config", "--std", "lua51", "--only", "1", *names, "--", "-"]
    for name, script in ALL.items():
        whole = subprocess.run(command, input=script.source, capture_output=True, text=True, check=False)
        assert whole.returncode == 0, f"{name}: {whole.stdout}"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.lua")), ids=lambda path: path.stem)
def test_no_script_calls_a_command_that_corrupts_the_memory_of_redis_6(path: Path) -> None:
    """Redis 6.2 keeps one array for the arguments of all commands of scripts.

    INCRBYFLOAT shrinks it to four, to replicate itself as SET ... KEEPTTL.  The next command with more arguments writes
    behind its end, and the server crashes or hangs."""
    assert not re.search(r"'INCRBYFLOAT'", path.read_text(encoding="utf-8"))
