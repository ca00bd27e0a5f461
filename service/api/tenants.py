"""API keys -> tenants.  The queue is fair between tenants, by weight; tenants never share prefix-cache entries.

The tenants file is TOML, with one table per tenant.  It contains SHA-256 digests of keys, so that it reveals no key:

    [acme]
    weight = 2.0                    # 1e-9 to 1e9: share of a busy fleet, relative to other tenants' weights
    adapters = ["sql", "acme-*"]    # LoRA adapters that it may use, * for any characters; absent: all; []: none
    highest_priority = -10          # the lowest number that `priority` of its requests may have; see --highest-priority
    admin = true                    # its keys have the admin scope, for example to watch the engines; default false
    key_sha256 = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    requests_per_minute = 600       # quotas, shared by all gateways; an absent quota is unlimited
    tokens_per_minute = 200000      # prompt and output tokens
    max_requests = 50               # concurrent requests, queued ones included

    [acme.key_priority]             # highest_priority of single keys, by digest
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 = 5
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase

import msgspec

from quire.engine.common.errors import OperatorError
from quire.engine.wire.messages import PRIORITIES
from quire.engine.wire.quotas import Quota
from quire.service.common.refusal import Refusal

SALT_BYTES = 16  # bytes of a salt's digest
QUOTAS = Quota.__struct_fields__
WEIGHTS = (1e-9, 1e9)  # minimum and maximum: between them, tokens / weight is exact enough in a double
MAX_QUOTA = 10**9  # maximum quota; with a larger one a bucket would miscount single tokens
SETTINGS = ("weight", "key_sha256", "admin", "highest_priority", "key_priority", "adapters", *QUOTAS)


class TenantsError(OperatorError):
    """The tenants file cannot be used.  The message is one line that names file, tenant and fault."""


class OverQuota(Refusal):
    """The 429 for a tenant that has used up a quota, even if the engines have free capacity."""


class Tenant(msgspec.Struct, frozen=True):
    """A group of API keys with a share of the fleet and a separate prefix cache."""

    name: str = ""  # "": the tenant of keys that belong to no named tenant
    weight: float = 1.0
    quota: Quota | None = None  # None: unlimited
    admin: bool = False  # its keys have the admin scope
    highest_priority: int = 0  # lowest number that `priority` of its requests may have; lower numbers run first
    adapters: tuple[str, ...] | None = None  # patterns of the LoRA adapters that it may use; None: all

    def may_use(self, adapter: str) -> bool:
        """Return whether the tenant may use a LoRA adapter, by its name."""
        return self.adapters is None or any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    def require_admin(self) -> None:
        """Raise Refusal(403) without the admin scope."""
        if not self.admin:
            message = "Authorization: this key lacks the admin scope (--admin-keys, or admin = true of its tenant)"
            raise Refusal(403, "admin_only", message)

    def priority(self, asked: int) -> int:
        """Return a requested priority, limited to `highest_priority`."""
        return max(asked, self.highest_priority)

    def salt(self, asked: str) -> str:
        """Return the salt that separates prefix caches, from the tenant and a client's `cache_salt`.

        Different tenants get different salts, since tenants' names contain no space. Redis and the engines get a digest
        of 32 characters, never the salt itself."""
        digest = hashlib.blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=SALT_BYTES).hexdigest()
        if self.name:
            return f"tenant {self.name} {digest if asked else ''}"
        return f"salt {digest}" if asked else ""


class Tenants:
    """All known API keys.  Without any key, all clients have access and share one tenant."""

    def __init__(
        self, api_keys: Iterable[str] = (), path: str = "", admin_keys: Iterable[str] = (), highest_priority: int = 0
    ) -> None:
        """`api_keys` and `admin_keys` belong to the nameless tenant, of weight 1.  `admin_keys` have the admin scope,
        and may use any priority. `path`: the tenants file, or "". If there is no key at all, all clients have the admin
        scope.  `highest_priority`: default for keys and tenants without a value of their own.

        Raises TenantsError if the file is unreadable, a name, weight, digest or field is invalid, or a key occurs
        twice."""
        self._highest = highest_priority
        self._path = path
        self._options = {_digest(key): Tenant(highest_priority=highest_priority) for key in api_keys if key}
        admin = Tenant(admin=True, highest_priority=PRIORITIES[0])
        self._options |= {_digest(key): admin for key in admin_keys if key}
        self._open = not self._options and not path
        self._of = self._options
        self.reload()

    @property
    def guarded(self) -> bool:
        """Whether requests need an API key."""
        return not self._open

    def reload(self) -> int:
        """Read the tenants file again.  Returns the number of its keys.  Removed keys are refused from now on.

        Raises TenantsError for an invalid file; then nothing changes."""
        found = self._read(self._path) if self._path else {}
        self._of = self._options | found
        return len(found)

    def _read(self, path: str) -> dict[str, Tenant]:
        """Return the tenant of each digest in a file.  Raises TenantsError."""
        tenants: dict[str, Tenant] = {}
        try:
            with open(path, "rb") as file:
                tables = tomllib.load(file)
        except OSError as error:
            raise TenantsError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not TOML or not UTF-8, or beyond Python's limits
            raise TenantsError(f"{path}: {error}") from None
        for name, table in tables.items():
            where = f"{path}: tenant '{name}'"
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise TenantsError(f"{where}: a name is 1 to 64 of a-z, A-Z, 0-9, '_', '-' and '.'")
            if not isinstance(table, dict):
                raise TenantsError(f"{where} must be a table with weight and key_sha256")
            if unknown := sorted(table.keys() - set(SETTINGS)):
                there = f"{', '.join(SETTINGS[:-1])} and {SETTINGS[-1]}"
                raise TenantsError(f"{where}: {unknown[0]} is not a setting; there are {there}")
            weight, digests, adapters = _weight(table, where), table.get("key_sha256"), _adapters(table, where)
            quota, admin = _quota(table, where), _admin(table, where)
            highest = _priority(table.get("highest_priority", self._highest), f"{where}: highest_priority")
            if not isinstance(digests, list) or not digests:
                raise TenantsError(f"{where}: key_sha256 must be a list of at least one digest")
            for digest in digests:
                if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
                    raise TenantsError(f"{where}: key_sha256 holds {digest!r}; it must be 64 digits of 0-9a-f")
                if digest in tenants or digest in self._options:
                    raise TenantsError(f"{where}: the key with digest {digest[:8]}... is given twice")
                tenants[digest] = Tenant(name, weight, quota, admin, highest, adapters)
            for digest, bound in _key_priorities(table, where, digests).items():
                tenants[digest] = msgspec.structs.replace(tenants[digest], highest_priority=bound)
        return tenants

    def of(self, authorization: str) -> Tenant:
        """Return the tenant of the key in an Authorization header.  Raises Refusal(401) for an unknown key.

        Keys are looked up by digest, so the response time does not show how many characters of a guess are right."""
        if self._open:
            return Tenant(admin=True, highest_priority=self._highest)
        scheme, _, key = authorization.partition(" ")
        tenant = self._of.get(_digest(key.strip()))
        if scheme.lower() != "bearer" or tenant is None:
            raise Refusal(401, "invalid_api_key", "Authorization: a valid 'Bearer' key is needed")
        return tenant

    def owner(self, authorization: str) -> str:
        """Return the digest of the key in an Authorization header; "" without keys.

        Only the key that made a request may resume it."""
        return "" if self._open else _digest(authorization.partition(" ")[2].strip())


def _weight(table: dict[str, object], where: str) -> float:
    """Return a tenant's weight.  Raises TenantsError, whose text begins with `where`."""
    weight = table.get("weight")
    if weight is None:
        raise TenantsError(f"{where} has no weight; it must be a number > 0")
    smallest, largest = WEIGHTS
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not smallest <= weight <= largest:
        raise TenantsError(
            f"{where}: weight is {weight!r:.60}; it must be a number > 0, from {smallest:g} to {largest:g}"
        )
    return float(weight)


def _quota(table: dict[str, object], where: str) -> Quota | None:
    """Return the quotas of a tenant's table, None without any.  Raises TenantsError, whose text begins with `where`."""
    given: dict[str, int] = {}
    for name in table.keys() & set(QUOTAS):
        value = table[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_QUOTA:
            raise TenantsError(f"{where}: {name} is {value!r}; it must be a whole number from 1 to {MAX_QUOTA}")
        given[name] = value
    return Quota(**given) if given else None


def _admin(table: dict[str, object], where: str) -> bool:
    """Return whether a tenant's keys have the admin scope.  Raises TenantsError, whose text begins with `where`."""
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise TenantsError(f"{where}: admin is {admin!r}; it must be true or false")
    return admin


def _adapters(table: dict[str, object], where: str) -> tuple[str, ...] | None:
    """Return the patterns of a tenant's LoRA adapters; None: all.  Raises TenantsError."""
    if "adapters" not in table:
        return None
    patterns = table["adapters"]
    if not isinstance(patterns, list):
        raise TenantsError(f"{where}: adapters must be a list of names, with * for any characters")
    for pattern in patterns:
        if not isinstance(pattern, str) or not re.fullmatch(r"[\w.:/*-]{1,128}", pattern, re.ASCII):
            raise TenantsError(
                f"{where}: adapters holds {str(pattern)[:60]!r}; a name has 1 to 128 letters, digits and . _ - : / or *"
            )
    return tuple(patterns)


def _priority(value: object, where: str) -> int:
    """Check a value of `highest_priority`.  Raises TenantsError, whose text begins with `where`."""
    first, last = PRIORITIES
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise TenantsError(f"{where} is {value!r}; it must be a whole number from {first} (first) to {last}")
    return value


def _key_priorities(table: dict[str, object], where: str, digests: list[str]) -> dict[str, int]:
    """Return the table `key_priority` of a tenant: digest of a key -> highest priority.  Raises TenantsError."""
    bounds = table.get("key_priority", {})
    if not isinstance(bounds, dict) or not set(bounds) <= set(digests):
        raise TenantsError(f"{where}: key_priority must be a table of digests of key_sha256, with a number for each")
    return {digest: _priority(value, f"{where}: key_priority.{digest[:8]}...") for digest, value in bounds.items()}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
