"""CPUs and memory of containers: cgroup trees of both versions, and the limits that this machine lets a test set."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from quire.engine.common import host_resources
from quire.engine.common.host_resources import GIB, Resources, read

ROOT = Path(__file__).resolve().parents[2]
SHOW = [sys.executable, "-c", "from quire.engine.common import host_resources as h; print(h.usable_cpus(), h.read())"]
V2 = "31 23 0:28 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 {root} {mount} rw,relatime - cgroup cgroup rw,{controllers}"


def tree(folder: Path, own: str, mounts: list[str], files: dict[str, str], *, memory_gib: int = 64) -> Path:
    """Write a /proc and a /sys below `folder`."""
    files = {
        "proc/self/cgroup": own,
        "proc/self/mountinfo": "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", "broken line", *mounts]),
        "proc/meminfo": f"MemFree: 1 kB\nMemTotal:       {memory_gib << 20} kB\n",
        **files,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def v2(folder: Path, files: dict[str, str], own: str = "0::/", root: str = "/", memory_gib: int = 64) -> Path:
    mounts = [V2.format(root=root, mount="/sys/fs/cgroup")]
    return tree(folder, own, mounts, {f"sys/fs/cgroup/{k}": v for k, v in files.items()}, memory_gib=memory_gib)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("400000 100000", 4),
        ("250000 100000", 2),  # rounded down
        ("50000 100000", 1),  # at least one
        ("max 100000", 64),
        ("max", 64),
        ("6400000000 100000", 64),  # more than the host has
        ("", 64),
        ("garbage here", 64),
        ("100000 0", 64),
        ("-5 100000", 64),
    ],
)
def test_a_quota_of_version_2(tmp_path: Path, quota: str, cpus: int) -> None:
    found = read(v2(tmp_path, {"cpu.max": quota}), affinity=64, host_cpus=64)
    assert found == Resources(cpus, 64, "cgroup quota" if cpus < 64 else "", 64 * GIB, False)


def test_the_smallest_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    files = {
        "a/cpu.max": "300000 100000",
        "a/b/cpu.max": "max 100000",
        "a/b/c/cpu.max": "800000 100000",
        "a/memory.max": "max",
        "a/b/memory.max": str(3 * GIB),
        "a/b/c/memory.max": str(8 * GIB),
        "a/b/c/d/cpu.max": "100000 100000",  # not an ancestor
        "a/b/c/d/memory.max": str(GIB),
    }
    found = read(v2(tmp_path, files, own="0::/a/b/c"), affinity=64, host_cpus=64)
    assert found == Resources(3, 64, "cgroup quota", 3 * GIB, True)
    assert str(found) == "using 3 of 64 CPUs (cgroup quota), memory limit 3.0 GiB"


@pytest.mark.parametrize(("high", "most"), [("max", 4), (str(2 * GIB), 2), (str(6 * GIB), 4), ("", 4)])
def test_memory_high_is_a_limit_too(tmp_path: Path, high: str, most: int) -> None:
    """Beyond it the kernel slows the processes down until they stand still."""
    files = {"memory.max": str(4 * GIB), "memory.high": high}
    assert read(v2(tmp_path, files), affinity=8, host_cpus=8).memory_bytes == most * GIB


@pytest.mark.parametrize("own", ["0::/", "0::/../other", "0::/kubepods/pod1/x", "0::/gone"])
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, own: str) -> None:
    """With and without a namespace of cgroups; a path that leads nowhere means the mounted group."""
    root = "/kubepods/pod1/x" if "kubepods" in own else "/"
    files = {"cpu.max": "200000 100000", "memory.max": str(GIB)}
    found = read(v2(tmp_path, files, own=own, root=root), affinity=8, host_cpus=8)
    assert (found.cpus, found.memory_bytes) == (2, GIB)


def test_limits_of_version_1(tmp_path: Path) -> None:
    mounts = [
        V1.format(root="/docker/x", mount="/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct"),
        V1.format(root="/docker/x", mount="/sys/fs/cgroup/mem\\040ory", controllers="memory"),
        V1.format(root="/", mount="/sys/fs/cgroup/systemd", controllers="name=systemd"),
        V2.format(root="/", mount="/sys/fs/cgroup/unified"),
    ]
    files = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/in/cpu.cfs_quota_us": "350000",
        "sys/fs/cgroup/cpu,cpuacct/in/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/mem ory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/mem ory/in/memory.limit_in_bytes": "9223372036854771712",
    }
    own = "5:cpu,cpuacct:/docker/x/in\n4:memory:/docker/x/in\n1:name=systemd:/\n0::/"
    found = read(tree(tmp_path, own, mounts, files), affinity=16, host_cpus=16)
    assert found == Resources(3, 16, "cgroup quota", 2 * GIB, True)


def test_affinity_counts_where_it_is_smaller(tmp_path: Path) -> None:
    root = v2(tmp_path, {"cpu.max": "400000 100000"})
    assert read(root, affinity=3, host_cpus=64)[:3] == (3, 64, "affinity")
    assert read(root, affinity=5, host_cpus=64)[:3] == (4, 64, "cgroup quota")


def test_without_proc_and_sys_it_is_the_host(tmp_path: Path) -> None:
    found = read(tmp_path, affinity=4, host_cpus=4)
    assert (found.cpus, found.cpu_reason, found.limited_memory) == (4, "", False)
    assert found.memory_bytes > 0
    assert "CPUs, memory of the host " in str(found)


def test_this_process_with_a_smaller_affinity() -> None:
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run(
        SHOW,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )
    assert done.stdout.startswith("1 ")


def limited(quota_us: int) -> tuple[Path, Path, str]:
    """A file system of cgroups that this process may write, the file of a quota there, and its text."""
    for mount, group in host_resources._groups(Path("/"), "cpu"):
        for name, text in (("cpu.max", f"{quota_us} 100000"), ("cpu.cfs_quota_us", str(quota_us))):
            made = mount / group / f"quire-test-{uuid.uuid4().hex[:8]}"
            try:
                made.mkdir()
            except OSError:
                continue
            if (made / name).exists():
                return made, made / name, text
            made.rmdir()
    pytest.skip("no cgroup with a CPU quota can be made here")


def test_this_machine_with_a_real_quota() -> None:
    group, file, text = limited(100_000)
    try:
        file.write_text(text)
        done = subprocess.run(
            SHOW,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        assert done.stdout.startswith("1 ")
        assert host_resources.usable_cpus() == 1 or "(cgroup quota)" in done.stdout
    finally:
        group.rmdir()
