"""CPUs and memory that this process may use, limited by its CPU affinity and its container's cgroups.

    usable CPUs  = min(CPUs in the affinity mask, the smallest CPU quota of the cgroup and its ancestors)
    memory limit = min(memory of the host, the smallest memory limit of the cgroup and its ancestors)

A quota of 2.5 CPUs counts as 2, because a third thread would be throttled, and the others would wait for it in every
step.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

GIB = 1 << 30
UNLIMITED = 1 << 60  # bytes; cgroup v1 writes a number of this order for "no limit"


class Resources(NamedTuple):
    """CPUs and memory that this process may use, and CPUs of the host."""

    cpus: int  # usable CPUs, at least 1
    host_cpus: int
    cpu_reason: str  # the limit on the CPUs: "affinity", "cgroup quota", or "" for none
    memory_bytes: int  # memory limit
    limited_memory: bool  # True: memory_bytes is a cgroup's limit; False: it is the host's memory

    def __str__(self) -> str:
        reason = f" ({self.cpu_reason})" if self.cpu_reason else ""
        whose = "limit" if self.limited_memory else "of the host"
        memory = f"memory {whose} {self.memory_bytes / GIB:.1f} GiB"
        return f"using {self.cpus} of {self.host_cpus} CPUs{reason}, {memory}"


def usable_cpus() -> int:
    """Return the number of threads that can compute at the same time, at least 1."""
    return read().cpus


def memory_limit() -> int:
    """Return the memory limit in bytes for this process and the other processes of its cgroup together."""
    return read().memory_bytes


def read(root: Path = Path("/"), affinity: int | None = None, host_cpus: int | None = None) -> Resources:
    """Read the limits.  For tests: `root`: folder of /proc and /sys; `affinity`, `host_cpus`: numbers of CPUs."""
    host = host_cpus or os.cpu_count() or 1
    bound = affinity if affinity is not None else _affinity(host)
    quota = min(_limits(root, "cpu", _cpu_quota), default=math.inf)
    allowed = max(1, math.floor(min(quota, host)))
    cpus = min(bound, allowed)
    reason = "" if cpus >= host else "cgroup quota" if allowed < bound else "affinity"
    memory, limit = _host_memory(root), min(_limits(root, "memory", _memory_limit), default=math.inf)
    return Resources(cpus, host, reason, int(min(memory, limit)), limit < memory)


def _affinity(host: int) -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host


def _host_memory(root: Path) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path, controller: str, limit_of: Callable[[Path], float]) -> Iterator[float]:
    """Iterate over the limits of this process's cgroup for a controller, and of all visible ancestors."""
    for mount, group in _groups(root, controller):
        place = mount / group
        while True:
            yield limit_of(place)
            if place == mount:
                break
            place = place.parent


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Iterate over (mount point, path of this process's group below it) of the cgroup file systems of a controller."""
    paths: dict[str, str] = {}  # cgroup path per version 1 controller; "": path of version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        paths |= dict.fromkeys(names.split(","), path)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            own = paths.get("")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            own = paths.get(controller)
        else:
            continue
        if own is not None:
            yield root / _unescaped(fields[4]).lstrip("/"), _below(own, _unescaped(fields[3]))


def _below(path: str, mounted: str) -> Path:
    """Return a group's path relative to the mounted group; ".": outside, so the mounted group is the container's."""
    inside = path == mounted or path.startswith(mounted.rstrip("/") + "/")
    relative = path[len(mounted.rstrip("/")) :].strip("/") if inside else ""
    return Path(".") if ".." in relative.split("/") else Path(relative or ".")


def _unescaped(text: str) -> str:
    """Decode the octal escapes in /proc/self/mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _cpu_quota(group: Path) -> float:
    """Return the CPU quota of a group, in CPUs; infinity if it has no readable quota."""
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else math.inf
    except ValueError:  # "max", or no such file
        return math.inf


def _memory_limit(group: Path) -> float:
    """Return the memory limit of a group in bytes; infinity if it has no readable limit.

    `memory.high` counts as a limit, because the kernel throttles processes above it heavily."""
    texts = (_text(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes"))
    sizes = (int(text) for text in texts if re.fullmatch(r"\d{1,30}", text, re.ASCII))  # else "max", or no such file
    return min((size for size in sizes if 0 < size < UNLIMITED), default=math.inf)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
