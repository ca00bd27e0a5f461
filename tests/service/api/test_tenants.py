"""Keys and tenants: known keys find their tenant, and errors name each fault of the file."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from pathlib import Path

import pytest

from quire.service.api.tenants import Tenant, Tenants, TenantsError
from quire.service.common.refusal import Refusal
from quire.service.delivery.tenants_watch import TenantsWatch
from tests.service.fakes import settled


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(folder: Path, text: str) -> str:
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)


def test_keys_find_their_tenant(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"[acme]\nweight = 2\nkey_sha256 = ['{digest('a1')}', '{digest('a2')}']\n"
        f"[b]\nweight = 0.5\nkey_sha256 = ['{digest('b')}']\n",
    )
    tenants = Tenants(["plain"], path)
    assert [tenants.of(f"Bearer {key}") for key in ("a1", "a2", "b", "plain")] == [
        Tenant("acme", 2.0),
        Tenant("acme", 2.0),
        Tenant("b", 0.5),
        Tenant(),
    ]
    for wrong in ("", "Bearer", "Bearer c", "Basic a1", "a1", f"Bearer {digest('a1')}", "Bearer \udcff"):
        with pytest.raises(Refusal) as caught:
            tenants.of(wrong)
        assert caught.value.status == 401


def test_without_keys_everybody_may_ask() -> None:
    assert Tenants().of("") == Tenants(["", ""]).of("Bearer x") == Tenant(admin=True)


def test_the_admin_scope_is_given_by_an_option_or_in_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"[ops]\nweight = 1\nadmin = true\nkey_sha256 = ['{digest('o')}']\n"
        f"[acme]\nweight = 1\nadmin = false\nkey_sha256 = ['{digest('a')}']\n",
    )
    tenants = Tenants(["plain", "both"], path, ["root", "both", ""])
    found = {key: tenants.of(f"Bearer {key}").admin for key in ("o", "a", "plain", "both", "root")}
    assert found == {"o": True, "a": False, "plain": False, "both": True, "root": True}
    assert Tenants((), "", ["root"]).guarded
    with pytest.raises(Refusal):
        tenants.of("Bearer ")


def test_no_two_tenants_share_a_salt() -> None:
    asked = ("", "x", "b x", "tenant b x", "salt x")
    salts = [Tenant(name).salt(salt) for name, salt in itertools.product(("", "b", "c"), asked)]
    assert len(set(salts)) == len(salts)
    assert Tenant().salt("") == ""


KEY = f"key_sha256 = ['{'0' * 64}']"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[acme]\n{KEY}", "tenant 'acme' has no weight; it must be a number > 0"),
        (f"[acme]\nweight = 0\n{KEY}", "tenant 'acme': weight is 0; it must be a number > 0"),
        (f"[acme]\nweight = -1.5\n{KEY}", "tenant 'acme': weight is -1.5; it must be"),
        (f"[acme]\nweight = nan\n{KEY}", "tenant 'acme': weight is nan; it must be"),
        (f"[acme]\nweight = inf\n{KEY}", "tenant 'acme': weight is inf; it must be"),
        (f"[acme]\nweight = true\n{KEY}", "tenant 'acme': weight is True; it must be"),
        (f"[acme]\nweight = 'two'\n{KEY}", "tenant 'acme': weight is 'two'; it must be"),
        ("[acme]\nweight = 1", "tenant 'acme': key_sha256 must be a list"),
        ("[acme]\nweight = 1\nkey_sha256 = ['secret']", "tenant 'acme': key_sha256 holds 'secret'; it must be 64"),
        (f"[acme]\nweight = 1\nadmin = 1\n{KEY}", "tenant 'acme': admin is 1; it must be true or false"),
        (f"[acme]\nweight = 1\nwieght = 1\n{KEY}", "tenant 'acme': wieght is not a setting"),
        (f"[acme]\nweight = 1\n{KEY}\n[b]\nweight = 1\n{KEY}", "tenant 'b': the key with digest 00000000... is given"),
        (f"['a b']\nweight = 1\n{KEY}", "tenant 'a b': a name is 1 to 64 of"),
        (f"[acme]\nweight = 1e-310\n{KEY}", "tenant 'acme': weight is 1e-310; it must be"),  # tokens / it is infinite
        (f"[acme]\nweight = 1{'0' * 400}\n{KEY}", "; it must be a number > 0"),
        (f"[acme]\nweight = {'1' * 5000}\n{KEY}", "tenants.toml: "),
        (f"[acme]\nweight = {'[' * 5000}{']' * 5000}\n{KEY}", "tenants.toml: "),
        (f"[acme]\nweight = 2026-02-30\n{KEY}", "tenants.toml: "),
        ("acme = 1", "tenant 'acme' must be a table"),
        ("[acme", "tenants.toml: "),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TenantsError) as caught:
        Tenants((), write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TenantsError, match="No such file"):
        Tenants((), str(tmp_path / "none.toml"))


def test_priorities_are_a_right_of_tenant_and_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"[acme]\nweight = 1\nhighest_priority = -10\nkey_sha256 = ['{digest('a')}', '{digest('batch')}']\n"
        f"key_priority = {{ {digest('batch')} = 50 }}\n"
        f"[b]\nweight = 1\nkey_sha256 = ['{digest('b')}']\n",
    )
    tenants = Tenants(["plain"], path, ["root"])
    found = {key: tenants.of(f"Bearer {key}").priority(-100) for key in ("a", "batch", "b", "plain", "root")}
    assert found == {"a": -10, "batch": 50, "b": 0, "plain": 0, "root": -100}
    assert tenants.of("Bearer a").priority(7) == 7
    assert Tenants().of("").priority(-1) == 0
    assert Tenants(["k"], highest_priority=-5).of("Bearer k").priority(-100) == -5


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("highest_priority = 101", "highest_priority is 101; it must be a whole number from -100 (first) to 100"),
        ("highest_priority = true", "highest_priority is True; "),
        ("key_priority = 3", "key_priority must be a table of digests of key_sha256"),
        (f"key_priority = {{ {digest('c')} = 1 }}", "key_priority must be a table of digests of key_sha256"),
        (f"key_priority = {{ {digest('a')} = 1.5 }}", f"key_priority.{digest('a')[:8]}... is 1.5; it must be"),
    ],
)
def test_a_wrong_bound_of_priorities_is_named(tmp_path: Path, setting: str, why: str) -> None:
    path = write(tmp_path, f"[acme]\nweight = 1\n{setting}\nkey_sha256 = ['{digest('a')}']\n")
    with pytest.raises(TenantsError) as error:
        Tenants((), path)
    assert str(error.value).startswith(f"{path}: tenant 'acme': {why}")


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, f"[acme]\nweight = 1\nkey_sha256 = ['{digest('old')}']\n")
    tenants = Tenants(["plain"], path)

    def known(key: str) -> bool:
        try:
            return bool(tenants.of(f"Bearer {key}"))
        except Refusal:
            return False

    async with TenantsWatch(tenants, path, look_s=0.01).watching():
        for broken in ("[acme]\nweight = 0\n", f"a = {'[' * 5000}", f"a = {'1' * 5000}"):
            caplog.clear()
            write(tmp_path, broken)
            await settled(lambda: "is not used" in caplog.text)
            assert known("old")
        os.remove(path)
        await settled(lambda: "No such file" in caplog.text)
        assert known("old")
        (tmp_path / "next").write_text(f"[acme]\nweight = 1\nkey_sha256 = ['{digest('new')}']\n")
        os.replace(tmp_path / "next", path)  # as mounted secrets change
        await settled(lambda: known("new"))
        assert not known("old")
        assert known("plain")
        caplog.clear()
        with caplog.at_level("INFO"):
            os.kill(os.getpid(), signal.SIGUSR1)
            await settled(lambda: "read the file of tenants again" in caplog.text)
