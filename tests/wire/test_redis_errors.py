"""Which errors of Redis cause a wait, a new connection or a one-line error, on every supported server."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest
import redis
from redis import exceptions

from quire.engine.common.embedded_redis import EmbeddedRedis
from quire.engine.wire import engine_side, link
from quire.engine.wire.engine_side import EngineSide
from quire.engine.wire.link import BusDown
from quire.engine.wire.redis_errors import Remedy, code_of, one_line, remedy
from quire.engine.wire.scripts import Script
from tests.pace import paced, patience
from tests.wire.sides import Bus, load

IN_SCRIPT_62 = "Error running script (call to f_ab01): @user_script:1: @user_script: 1: -"
IN_SCRIPT_7 = " script: ab01, on @user_script:1."


@pytest.mark.parametrize(
    ("error", "code", "found"),
    [
        # As 7, Valkey and plain commands of 6.2 give them to redis-py, which cuts off the codes that it knows.
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM", Remedy.WAIT),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "READONLY", Remedy.RECONNECT),
        (exceptions.MasterDownError("Link with MASTER is down"), "MASTERDOWN", Remedy.RECONNECT),
        (exceptions.ClusterDownError("The cluster is down"), "CLUSTERDOWN", Remedy.RECONNECT),
        (exceptions.TryAgainError("Multiple keys request during rehashing of slot"), "TRYAGAIN", Remedy.WAIT),
        (exceptions.MovedError("12 h:1"), "MOVED", Remedy.RECONNECT),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "LOADING", Remedy.WAIT),
        (exceptions.ExecAbortError("Transaction discarded because of previous errors."), "EXECABORT", Remedy.WAIT),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space"), "MISCONF", Remedy.WAIT),
        (exceptions.ResponseError("BUSY Redis is busy running a script."), "BUSY", Remedy.WAIT),
        (exceptions.ResponseError("UNBLOCKED force unblock from blocking operation"), "UNBLOCKED", Remedy.RECONNECT),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas."), "NOREPLICAS", Remedy.RECONNECT),
        (exceptions.ResponseError(f"NOREPLICAS Not enough.{IN_SCRIPT_7}"), "NOREPLICAS", Remedy.RECONNECT),
        # As 6.2 wraps them in a script.
        (exceptions.ResponseError(f"{IN_SCRIPT_62}OOM command not allowed"), "OOM", Remedy.WAIT),
        (exceptions.ResponseError(f"{IN_SCRIPT_62}READONLY You can't write"), "READONLY", Remedy.RECONNECT),
        (exceptions.ResponseError(f"{IN_SCRIPT_62}MISCONF Redis is configured"), "MISCONF", Remedy.WAIT),
        (exceptions.ResponseError(f"{IN_SCRIPT_62}NOREPLICAS Not enough"), "NOREPLICAS", Remedy.RECONNECT),
        # Time may mend these, or nothing.
        (exceptions.ResponseError("NEWCODE of a later version"), "NEWCODE", Remedy.UNKNOWN),
        (exceptions.ResponseError("upstream failure"), "ERR", Remedy.UNKNOWN),
        (exceptions.ResponseError(f"Script killed by user with SCRIPT KILL...{IN_SCRIPT_7}"), "ERR", Remedy.UNKNOWN),
        (exceptions.ResponseError(f"user_script:1: attempt to call a nil value{IN_SCRIPT_7}"), "ERR", Remedy.UNKNOWN),
        # An operator can.
        (exceptions.AuthenticationError("invalid username-password pair"), "WRONGPASS", Remedy.OPERATOR),
        (exceptions.AuthenticationError("HELLO must be called", status_code="NOAUTH"), "NOAUTH", Remedy.OPERATOR),
        (exceptions.NoPermissionError("this user has no permissions"), "NOPERM", Remedy.OPERATOR),
        # Nothing can.
        (exceptions.ResponseError("SUPERSEDED"), "SUPERSEDED", Remedy.NONE),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE", Remedy.NONE),
        (
            exceptions.ResponseError("Error running script (call to f_ab01): @user_script:1: WRONGTYPE Operation"),
            "WRONGTYPE",
            Remedy.NONE,
        ),
        (exceptions.ResponseError("Error compiling script (new function): user_script:1: x"), "ERR", Remedy.NONE),
        (exceptions.ResponseError("wrong number of arguments for 'get' command"), "ERR", Remedy.NONE),
        (exceptions.ResponseError(f"{IN_SCRIPT_62[:-1]}Wrong number of args calling Redis"), "ERR", Remedy.NONE),
        (exceptions.ResponseError("unknown command `FOO`, with args beginning with: "), "ERR", Remedy.NONE),
        (exceptions.DataError("Invalid input of type: 'dict'."), "", Remedy.NONE),
        # Not replies at all.
        (exceptions.ConnectionError("max number of clients reached"), "", Remedy.RECONNECT),
        (exceptions.TimeoutError("Timeout reading from socket"), "", Remedy.RECONNECT),
        (exceptions.InvalidResponse("Protocol Error"), "", Remedy.RECONNECT),
        (ConnectionResetError(), "", Remedy.RECONNECT),
        (TimeoutError(), "", Remedy.RECONNECT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_is_known_by_its_class_and_its_code(error: Exception, code: str, found: Remedy) -> None:
    assert (code_of(error), remedy(error)) == (code, found)
    assert "\n" not in one_line(error)
    assert code in ("", "ERR") or code in one_line(error)


def refusal(command: Callable[[], object]) -> Exception:
    with pytest.raises(redis.RedisError) as caught:
        command()
    return caught.value


@pytest.mark.every_redis
def test_what_a_server_says_is_known(own_server: EmbeddedRedis) -> None:
    """The same table, from the mouth of each server: plain, and in a script."""
    with redis.Redis.from_url(own_server.url, protocol=2) as client:

        def write() -> Exception:
            return refusal(lambda: client.set("a", 1))

        def script(source: str = "return redis.call('SET', 'a', 1)") -> Exception:
            return refusal(lambda: client.eval(source, 0))

        client.lpush("list", 1)
        assert code_of(script("return redis.call('GET', 'list')")) == "WRONGTYPE"
        assert "SUPERSEDED" in one_line(script("return redis.error_reply('SUPERSEDED')"))
        for hopeless in ("return (", "return redis.call('GET')", "return redis.call('FOO')"):
            assert remedy(script(hopeless)) is Remedy.NONE
        assert remedy(script("return nil + 1")) is Remedy.UNKNOWN
        client.config_set("maxmemory", 1)
        assert (code_of(write()), code_of(script())) == ("OOM", "OOM")
        client.config_set("maxmemory", 0)
        client.config_set("min-replicas-to-write", 1)
        assert (code_of(write()), code_of(script())) == ("NOREPLICAS", "NOREPLICAS")
        client.config_set("min-replicas-to-write", 0)
        blocked: list[Exception] = []
        with redis.Redis.from_url(own_server.url, protocol=2) as other:
            waiting = threading.Thread(
                target=lambda: blocked.append(refusal(lambda: other.xread({"s": "0"}, block=20_000)))
            )
            waiting.start()
            while not client.info("clients")["blocked_clients"]:
                time.sleep(0.01)
            client.replicaof("127.0.0.1", "9")
            waiting.join()
        assert [code_of(error) for error in blocked] == ["UNBLOCKED"]
        assert (code_of(write()), code_of(script())) == ("READONLY", "READONLY")
        client.config_set("replica-serve-stale-data", "no")
        assert code_of(refusal(lambda: client.get("a"))) == "MASTERDOWN"
        assert code_of(script()) in ("MASTERDOWN", "READONLY")


@pytest.mark.every_redis
async def test_a_wrong_password_is_one_line_at_once(own_server: EmbeddedRedis, own_bus: Bus) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "right")
        client.auth("right")
        try:
            for url in (own_server.url, own_server.url.replace("unix://", "unix://:wrong@")):
                for opening in (own_bus.gateway, own_bus.engine):
                    began = asyncio.get_running_loop().time()
                    with pytest.raises(BusDown, match=r"NOAUTH|WRONGPASS") as caught:
                        await opening(url=url)
                    assert "\n" not in str(caught.value)
                    assert "wrong" not in str(caught.value).partition("WRONGPASS")[0], "the password"
                    assert asyncio.get_running_loop().time() - began < link.PATIENCE_S, "waited all the same"
        finally:
            client.config_set("requirepass", "")


FAULTY = Script("return nil + 1")


async def test_a_fault_of_ours_is_logged_and_ends_an_endless_try(
    own_bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link, "GIVE_UP_S", 0.3)
    engine = await own_bus.engine()
    monkeypatch.setattr(engine_side, "SYNC", FAULTY)
    with caplog.at_level(logging.ERROR), pytest.raises(BusDown, match="arithmetic on a nil value"):
        async with asyncio.timeout(patience(100)):
            await engine.sync([], [], load("e1"), 0, 0)
    assert sum("refuses a command" in record.message for record in caplog.records) == 1


@pytest.mark.every_redis
async def test_an_engine_waits_for_longer_where_time_mends_it(
    own_server: EmbeddedRedis, own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_s = paced(0.3)
    monkeypatch.setattr(link, "GIVE_UP_S", give_up_s)
    engine: EngineSide = await own_bus.engine()
    with redis.Redis.from_url(own_server.url) as client:
        client.replicaof("127.0.0.1", "9")
        exchanging = asyncio.create_task(engine.sync([], [], load("e1"), 0, 0))
        await asyncio.sleep(3 * give_up_s)
        assert not exchanging.done()
        client.replicaof("NO", "ONE")
    async with asyncio.timeout(patience(100)):
        await exchanging
