"""Captured outputs of real kinds of machines, and what is read from them."""

from __future__ import annotations

import pytest
from support import doctor_machines as machines
from support.doctor_machines import GIB

from mlx_paged import cgroups
from mlx_paged.doctor import machine as module
from mlx_paged.doctor.machine import Captures, nvidia_gpus, read, take
from mlx_paged.doctor.terminal import machine_facts

# --- Macs -----------------------------------------------------------------------------------------


def test_a_mac() -> None:
    found = read(machines.M1)
    assert found.is_mac and found.chip == "Apple M1" and found.architecture == "arm64"
    assert found.system == "macOS 14.7.1"
    assert found.logical_cores == found.usable_cpus == 8
    assert found.memory_bytes == 16 * GIB
    [gpu] = found.gpus
    assert gpu.name == "Apple M1"
    assert not found.is_translated and found.limits == cgroups.Limits()


def test_a_mac_that_says_nothing_is_a_mac_of_which_nothing_is_known() -> None:
    found = read(Captures("darwin", "arm64"))
    assert found.is_mac
    assert (found.chip, found.memory_bytes, found.gpus) == (None, None, ())
    assert found.usable_cpus is None
    machine_facts(found)  # and it can be shown


def test_rosetta_is_seen() -> None:
    found = read(machines.mac("Apple M2", 8, 8 * GIB, translated=True))
    assert found.is_translated and found.architecture == "x86_64"


# --- Linux ----------------------------------------------------------------------------------------


def test_an_nvidia_machine() -> None:
    found = read(machines.H200)
    assert found.system == "Ubuntu 24.04.3 LTS"
    assert found.chip == "Intel(R) Xeon(R) Platinum 8481C"
    assert (found.logical_cores, found.affinity) == (32, 32)
    assert len(found.gpus) == 2
    gpu = found.gpus[0]
    assert (gpu.name, gpu.driver, gpu.compute_capability) == ("NVIDIA H200", "580.95.05", "9.0")
    assert gpu.memory_bytes == 143771 << 20
    assert found.limits == cgroups.Limits()


@pytest.mark.parametrize(
    "output",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "No devices were found\n",
    ],
)
def test_an_nvidia_smi_that_fails_names_no_gpu(output) -> None:
    assert nvidia_gpus(output) == ()


def test_a_gpu_of_which_nvidia_smi_does_not_know_all() -> None:
    [gpu] = nvidia_gpus("NVIDIA GB10, [N/A], 580.95.05, [N/A]\n")
    assert (gpu.memory_bytes, gpu.compute_capability) == (None, None)


def test_an_arm_machine() -> None:
    found = read(machines.ARM)
    assert found.chip is None and found.architecture == "aarch64"
    assert found.memory_bytes == 8 * GIB and found.usable_cpus == 4


def test_a_linux_without_proc_is_one_of_which_nothing_is_known() -> None:
    found = read(Captures("linux", "riscv64"))
    assert found.system == "Linux" and found.chip is None and found.memory_bytes is None
    machine_facts(found)


# --- Control groups -------------------------------------------------------------------------------


def test_a_container_of_version_2() -> None:
    found = read(machines.CONTAINER_V2)
    assert found.memory_bytes == 256 * GIB
    assert found.limits.memory_bytes == 8 * GIB
    assert found.limits.memory_file == "/sys/fs/cgroup/memory.max"
    assert found.usable_cpus == 1.5
    assert "limited to 8.0 GiB" in dict(machine_facts(found))["memory"]
    assert "this process gets 1.5" in dict(machine_facts(found))["cores"]


def test_a_container_of_version_1() -> None:
    found = read(machines.CONTAINER_V1)
    assert found.limits.memory_bytes == 4 * GIB and found.usable_cpus == 4


def test_the_limit_of_a_group_below_the_root_counts() -> None:
    limits = read(machines.SERVICE).limits
    assert limits.memory_bytes == 6 * GIB
    assert limits.memory_file == "/sys/fs/cgroup/system.slice/mlx.service/memory.max"


def test_the_tightest_of_a_chain_holds() -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/memory.max": "1000\n",
        "/sys/fs/cgroup/a/b/memory.max": "2000\n",
        "/sys/fs/cgroup/a/cpu.max": "300000 100000\n",
        "/sys/fs/cgroup/a/b/cpu.max": "50000 100000\n",
    }
    limits = cgroups.limits(files)
    assert (limits.memory_bytes, limits.cpus) == (1000, 0.5)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", "", "nonsense"])
def test_no_limit(text) -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": text,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": text,
        "/sys/fs/cgroup/cpu.max": "max 100000",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert cgroups.limits(files) == cgroups.Limits()


# --- This machine ---------------------------------------------------------------------------------


def test_this_machine_is_taken_down_and_understood() -> None:
    found = read(take())
    assert found.architecture and found.memory_bytes and found.memory_bytes > GIB // 4
    assert found.logical_cores and found.usable_cpus and found.usable_cpus <= found.logical_cores


def test_the_disk_is_that_of_the_models(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "there"))
    disk = read(take()).disk
    assert disk is not None and disk.folder == str(tmp_path / "not" / "there" / "hub")
    assert disk.free_bytes > 0


def test_a_missing_program_is_absent(monkeypatch) -> None:
    commands = {"linux": {"no": ("no-such-program",)}, "darwin": {"no": ("no-such-program",)}}
    monkeypatch.setattr(module, "COMMANDS", commands)
    assert take().commands == {}


@pytest.mark.parametrize("name", list(machines.ALL))
def test_every_machine_can_be_shown(name) -> None:
    facts = dict(machine_facts(read(machines.ALL[name])))
    assert {"system", "chip", "cores", "memory", "GPU"} <= set(facts)
    assert "unknown" not in facts.values()
