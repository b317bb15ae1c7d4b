"""Pressure and quotas, from trees as the kernel draws them under version 1, version 2, both, and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pingpongd.cgroups import CgroupProbe, Pressure

PID = 123


class Tree:
    """A /proc and a /sys/fs/cgroup of the test's own, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc, self.now = root, root / "proc", 50.0
        self.mounts: list[str] = []
        self.write("proc/pressure/.keep", "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, point: str, root: str, kind: str, options: str = "rw") -> None:
        (self.root / point).mkdir(parents=True, exist_ok=True)
        self.mounts.append(f"31 23 0:28 {root} {self.root}/{point} rw,relatime - {kind} {kind} {options}\n")

    def member(self, text: str, pid: int = PID) -> None:
        self.write(f"proc/{pid}/cgroup", text)

    def pressure(self, folder: str, resource: str, total_us: int) -> None:
        name = resource if folder == "proc/pressure" else f"{resource}.pressure"
        self.write(
            f"{folder}/{name}", f"some avg10=1.00 avg60=0.50 avg300=0.10 total={total_us}\nfull avg10=0 total=7\n"
        )

    def probe(self) -> CgroupProbe:
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(self.mounts))
        return CgroupProbe(self.proc, clock=lambda: self.now)

    def look(self, probe: CgroupProbe, pid: int = PID, after: float = 1.0) -> Pressure:
        self.now += after
        probe.begin()
        return probe.look(pid)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_pressure_is_of_the_narrowest_group_that_has_it(tree: Tree) -> None:
    tree.mount("cg", "/", "cgroup2")
    tree.member("0::/system.slice/pingpongd.service\n")
    tree.write("cg/system.slice/pingpongd.service/cgroup.procs", "")
    for folder, total in (("cg/system.slice/pingpongd.service", 100), ("cg/system.slice", 7), ("proc/pressure", 9)):
        tree.pressure(folder, "cpu", total)
    tree.pressure("cg/system.slice", "memory", 0)
    tree.pressure("proc/pressure", "io", 0)
    probe = tree.probe()
    assert tree.look(probe) == Pressure()  # one reading says nothing
    tree.pressure("cg/system.slice/pingpongd.service", "cpu", 250_100)
    tree.pressure("cg/system.slice", "memory", 500_000)
    tree.pressure("proc/pressure", "io", 4_000_000)
    found = tree.look(probe)
    assert found.cpu == pytest.approx(0.25)
    assert found.memory == pytest.approx(0.5)
    assert found.io == 1.0


def test_without_psi_nothing_is_said(tree: Tree) -> None:
    tree.mount("cg", "/", "cgroup2")
    tree.member("0::/\n")
    probe = tree.probe()
    tree.look(probe)
    assert tree.look(probe) == Pressure()


def test_in_a_container_the_mount_is_the_containers_own_group(tree: Tree) -> None:
    tree.mount("cg", "/docker/abc", "cgroup2")
    tree.member("0::/docker/abc\n")
    tree.pressure("cg", "cpu", 0)
    probe = tree.probe()
    tree.look(probe)
    tree.pressure("cg", "cpu", 100_000)
    assert tree.look(probe).cpu == pytest.approx(0.1)


@pytest.mark.parametrize("path", ["/../../other.slice", "/gone/since"])
def test_a_group_that_cannot_be_seen_leaves_what_is_mounted(tree: Tree, path: str) -> None:
    tree.mount("cg", "/", "cgroup2")
    tree.member(f"0::{path}\n")
    tree.pressure("cg", "cpu", 0)
    probe = tree.probe()
    tree.look(probe)
    tree.pressure("cg", "cpu", 300_000)
    assert tree.look(probe).cpu == pytest.approx(0.3)


def test_a_quota_of_version_2_counts_wherever_it_stands_above(tree: Tree) -> None:
    tree.mount("cg", "/", "cgroup2")
    tree.member("0::/pod/box\n")
    tree.write("cg/pod/box/cpu.stat", "usage_usec 1\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    tree.write("cg/pod/cpu.stat", "usage_usec 1\nnr_periods 100\nnr_throttled 10\nthrottled_usec 1000000\n")
    tree.write("cg/cpu.stat", "usage_usec 5\n")
    probe = tree.probe()
    assert tree.look(probe).throttled is None
    tree.write("cg/pod/cpu.stat", "usage_usec 2\nnr_periods 110\nnr_throttled 18\nthrottled_usec 1300000\n")
    assert tree.look(probe).throttled == pytest.approx(0.3)  # of the second, though in 8 of 10 periods
    tree.write("cg/pod/cpu.stat", "usage_usec 2\nnr_periods 120\nnr_throttled 22\nthrottled_usec 9300000\n")
    assert tree.look(probe).throttled == pytest.approx(0.4)  # 8 s in one second are of several cores
    assert tree.look(probe).throttled == 0.0


def test_a_quota_of_version_1_stands_in_another_hierarchy(tree: Tree) -> None:
    tree.mount("cg/cpu", "/", "cgroup", "rw,cpu,cpuacct")
    tree.mount("cg/unified", "/", "cgroup2")
    tree.member("4:memory:/m\n3:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n")
    tree.write("cg/cpu/box/cpu.stat", "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n")
    tree.pressure("cg/unified", "cpu", 0)
    probe = tree.probe()
    tree.look(probe)
    tree.write("cg/cpu/box/cpu.stat", "nr_periods 10\nnr_throttled 10\nthrottled_time 600000000\n")
    tree.pressure("cg/unified", "cpu", 200_000)
    found = tree.look(probe)
    assert found.throttled == pytest.approx(0.6)
    assert found.cpu == pytest.approx(0.2)


def test_two_workers_of_one_group_are_one_look(tree: Tree) -> None:
    tree.mount("cg", "/", "cgroup2")
    for pid in (PID, 124):
        tree.member("0::/\n", pid)
    tree.pressure("cg", "cpu", 0)
    tree.write("cg/cpu.stat", "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    probe = tree.probe()
    tree.look(probe)
    tree.pressure("cg", "cpu", 500_000)
    tree.write("cg/cpu.stat", "nr_periods 10\nnr_throttled 5\nthrottled_usec 400000\n")
    first = tree.look(probe)
    tree.now += 0.001
    assert probe.look(124) == first
    assert first.cpu == pytest.approx(0.5)
    assert first.throttled == pytest.approx(0.4)


def test_a_process_that_has_ended_is_no_error(tree: Tree) -> None:
    probe = tree.probe()
    assert tree.look(probe, pid=999) == Pressure()
