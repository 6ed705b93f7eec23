"""Captured outputs of real kinds of machines, and what is read from them."""

from __future__ import annotations

import dataclasses

import pytest
from support import doctor_machines as machines
from support.doctor_machines import GIB

from mlx_paged import cgroups
from mlx_paged.doctor import apple, capture, linux, mac
from mlx_paged.doctor.capture import Captures
from mlx_paged.doctor.hardware import machine
from mlx_paged.doctor.machine import CoreGroup
from mlx_paged.doctor.terminal import machine_facts

# --- Macs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captures", "chip", "performance", "efficiency", "gpu_cores", "bandwidth"),
    [
        (machines.M1, "Apple M1", 4, 4, 8, 68.3),
        (machines.M3_MAX, "Apple M3 Max", 12, 4, 40, 400),
        (machines.M4_PRO, "Apple M4 Pro", 10, 4, 20, 273),
        (machines.M5, "Apple M5", 4, 6, 10, 153),
    ],
)
def test_a_mac(captures, chip, performance, efficiency, gpu_cores, bandwidth) -> None:
    found = machine(captures)
    assert found.is_mac and found.chip == chip and found.architecture == "arm64"
    assert found.core_groups == (
        CoreGroup("Performance", performance),
        CoreGroup("Efficiency", efficiency),
    )
    assert found.physical_cores == found.logical_cores == performance + efficiency
    [gpu] = found.gpus
    assert (gpu.name, gpu.vendor, gpu.cores) == (chip, "Apple", gpu_cores)
    assert found.published is not None and found.published.bandwidth == bandwidth
    assert not found.is_translated and found.limits == cgroups.Limits()


def test_a_macs_system_and_memory() -> None:
    found = machine(machines.M1)
    assert found.system == "macOS 14.7.1 (23H222)"
    assert found.system_version == "14.7.1"
    assert found.model == "MacBookAir10,1"
    assert found.usable_memory == 16 * GIB


def test_cores_have_the_names_that_macos_gives_them() -> None:
    captures = machines.mac("Apple M5 Max", 6, 12, 40, 64 * GIB, names=("Super", "Performance"))
    assert machine(captures).core_groups == (CoreGroup("Super", 6), CoreGroup("Performance", 12))


def test_a_chip_that_is_not_in_the_table_has_no_published_bandwidth() -> None:
    found = machine(machines.mac("Apple M9 Ultra", 16, 8, 99, 512 * GIB))
    assert found.published is None
    assert ("published", "memory bandwidth unknown: this chip is not in the table") in (
        machine_facts(found)
    )


def test_a_mac_that_says_nothing_is_a_mac_of_which_nothing_is_known() -> None:
    found = machine(Captures("darwin", "arm64"))
    assert found.is_mac
    assert (found.chip, found.memory_bytes, found.gpus, found.core_groups) == (None, None, (), ())
    assert found.usable_cpus is None
    machine_facts(found)  # and it can be shown


@pytest.mark.parametrize(
    "output",
    ["", "not json", "[]", "{}", '{"SPDisplaysDataType": null}', '{"SPDisplaysDataType": [3, {}]}'],
)
def test_a_strange_system_profiler_has_no_gpus(output) -> None:
    assert mac.displays(output) == ()


def test_rosetta_is_seen() -> None:
    found = machine(machines.mac("Apple M2", 4, 4, 10, 8 * GIB, translated=True))
    assert found.is_translated and found.architecture == "x86_64"


# --- Apple's table --------------------------------------------------------------------------------


def test_the_table_has_every_family_and_a_source_for_each_figure() -> None:
    names = {chip.name for chip in apple.CHIPS}
    assert {f"M{n}" for n in range(1, 6)} <= names
    assert {f"M{n} {kind}" for n in range(1, 6) for kind in ("Pro", "Max")} <= names
    assert {"M1 Ultra", "M2 Ultra", "M3 Ultra"} <= names
    assert "M4 Ultra" not in names, "Apple sold none"
    assert len({(chip.name, chip.gpu_cores) for chip in apple.CHIPS}) == len(apple.CHIPS)
    for chip in apple.CHIPS:
        assert "apple.com" in chip.source
        assert chip.bandwidth is None or 60 < chip.bandwidth < 1000


@pytest.mark.parametrize(
    ("brand", "cores", "bandwidth"),
    [
        ("Apple M3 Max", 30, 300),
        ("Apple M3 Max", 40, 400),
        ("Apple M4 Max", 32, 410),
        ("Apple M3 Ultra", 80, 819),
        ("Apple M2 Ultra", None, 800),  # both variants have the same
        ("Apple M5 Max", 32, None),  # not confirmed
        ("Apple M3 Max", None, None),  # the variants differ
    ],
)
def test_a_chip_is_found_by_name_and_gpu_cores(brand, cores, bandwidth) -> None:
    found = apple.find(brand, cores)
    assert found is not None and found.bandwidth == bandwidth


@pytest.mark.parametrize(
    ("brand", "cores"), [("Apple M3 Max", 35), ("Intel(R) Core(TM) i9", 8), ("Apple M", None)]
)
def test_nothing_is_guessed(brand, cores) -> None:
    assert apple.find(brand, cores) is None


# --- Linux ----------------------------------------------------------------------------------------


def test_an_nvidia_machine() -> None:
    found = machine(machines.H200)
    assert found.system == "Ubuntu 24.04.3 LTS"
    assert found.chip == "Intel(R) Xeon(R) Platinum 8481C"
    assert (found.physical_cores, found.logical_cores, found.affinity) == (16, 32, 32)
    assert found.instruction_sets[:2] == ("avx512", "avx2")
    assert found.cuda_version == "13.0"
    assert len(found.gpus) == 2
    gpu = found.gpus[0]
    assert (gpu.name, gpu.driver, gpu.compute_capability) == ("NVIDIA H200", "580.95.05", "9.0")
    assert gpu.memory_bytes == 143771 << 20
    assert found.limits == cgroups.Limits()
    assert found.published is None


@pytest.mark.parametrize(
    "output",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "No devices were found\n",
    ],
)
def test_an_nvidia_smi_that_fails_names_no_gpu(output) -> None:
    assert linux.nvidia(output) == ()


def test_a_gpu_of_which_nvidia_smi_does_not_know_all() -> None:
    [gpu] = linux.nvidia("NVIDIA GB10, [N/A], 580.95.05, [N/A]\n")
    assert (gpu.memory_bytes, gpu.compute_capability) == (None, None)


def test_an_arm_machine() -> None:
    found = machine(machines.ARM)
    assert found.chip == "ARM Neoverse V1"
    assert found.core_groups == (CoreGroup("ARM Neoverse V1", 4),)
    assert found.instruction_sets == ("neon", "sve")
    assert found.usable_memory == 8 * GIB and found.usable_cpus == 4


def test_an_unknown_arm_core_is_told_by_its_numbers() -> None:
    text = machines.ARM.files["/proc/cpuinfo"].replace("0xd40", "0xfff")
    files = {**machines.ARM.files, "/proc/cpuinfo": text}
    assert machine(dataclasses.replace(machines.ARM, files=files)).chip == "ARM core 0x41/0xfff"


def test_a_linux_without_proc_is_one_of_which_nothing_is_known() -> None:
    found = machine(Captures("linux", "riscv64"))
    assert found.system == "Linux" and found.chip is None and found.usable_memory is None
    machine_facts(found)


# --- Control groups -------------------------------------------------------------------------------


def test_a_container_of_version_2() -> None:
    found = machine(machines.CONTAINER_V2)
    assert found.memory_bytes == 256 * GIB
    assert found.usable_memory == found.limits.memory_bytes == 8 * GIB
    assert found.limits.memory_file == "/sys/fs/cgroup/memory.max"
    assert found.usable_cpus == 1.5
    assert "limited to 8.0 GiB" in dict(machine_facts(found))["memory"]
    assert "this process gets 1.5" in dict(machine_facts(found))["cores"]


def test_a_container_of_version_1() -> None:
    found = machine(machines.CONTAINER_V1)
    assert found.usable_memory == 4 * GIB and found.usable_cpus == 4


def test_the_limit_of_a_group_below_the_root_counts() -> None:
    limits = machine(machines.SERVICE).limits
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
    found = machine(capture.take())
    assert found.architecture and found.memory_bytes and found.memory_bytes > GIB // 4
    assert found.logical_cores and found.usable_cpus and found.usable_cpus <= found.logical_cores


def test_a_missing_program_is_absent(monkeypatch) -> None:
    commands = {"linux": {"no": ("no-such-program",)}, "darwin": {"no": ("no-such-program",)}}
    monkeypatch.setattr(capture, "COMMANDS", commands)
    assert capture.take().commands == {}


@pytest.mark.parametrize("name", list(machines.ALL))
def test_every_machine_can_be_shown(name) -> None:
    facts = dict(machine_facts(machine(machines.ALL[name])))
    assert {"system", "chip", "cores", "memory", "GPU"} <= set(facts)
    assert "unknown" not in facts.values()
