"""Captures of several kinds of machines, in the format of the real programs' output."""

from __future__ import annotations

from typing import Any

from mlx_paged.doctor.machine import Captures, Disk

GIB = 1 << 30


def mac(
    chip: str,
    cores: int,
    memory: int,
    *,
    version: str = "15.1",
    translated: bool = False,
    wired_limit_mb: int = 0,
) -> Captures:
    sysctl = [
        f"hw.memsize: {memory}",
        f"hw.logicalcpu: {cores}",
        f"machdep.cpu.brand_string: {chip}",
        f"sysctl.proc_translated: {int(translated)}",
        f"iogpu.wired_limit_mb: {wired_limit_mb}",
    ]
    versions = f"ProductName:\t\tmacOS\nProductVersion:\t\t{version}\nBuildVersion:\t\t24B83\n"
    return Captures(
        system="darwin",
        architecture="x86_64" if translated else "arm64",
        commands={"sysctl": "\n".join(sysctl) + "\n", "sw_vers": versions},
        disk=Disk("/Users/ada/.cache/huggingface/hub", 200 * GIB),
    )


M1 = mac("Apple M1", 8, 16 * GIB, version="14.7.1")
M3_MAX = mac("Apple M3 Max", 16, 128 * GIB)
M5 = mac("Apple M5", 10, 32 * GIB, version="26.1")


def x86_cpuinfo(name: str, sockets: int, cores: int, threads: int) -> str:
    blocks, number = [], 0
    for _ in range(threads):
        for socket in range(sockets):
            for core in range(cores):
                blocks.append(
                    f"processor\t: {number}\nvendor_id\t: GenuineIntel\nmodel name\t: {name}\n"
                    f"physical id\t: {socket}\ncore id\t\t: {core}\nflags\t\t: fpu sse2 fma\n"
                )
                number += 1
    return "\n".join(blocks)


def meminfo(total: int, available: int) -> str:
    return (
        f"MemTotal:       {total // 1024} kB\nMemFree:        {available // 2048} kB\n"
        f"MemAvailable:   {available // 1024} kB\nHugePages_Total:       0\n"
    )


UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\n'

H200 = Captures(
    system="linux",
    architecture="x86_64",
    commands={
        "nvidia-smi": "NVIDIA H200, 143771, 580.95.05, 9.0\nNVIDIA H200, 143771, 580.95.05, 9.0\n",
    },
    files={
        "/proc/cpuinfo": x86_cpuinfo("Intel(R) Xeon(R) Platinum 8481C", 2, 8, 2),
        "/proc/meminfo": meminfo(256 * GIB, 240 * GIB),
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        "/etc/os-release": UBUNTU,
        "/sys/fs/cgroup/user.slice/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
    },
    affinity=32,
)

ARM = Captures(
    system="linux",
    architecture="aarch64",
    files={
        "/proc/cpuinfo": "\n".join(
            f"processor\t: {i}\nBogoMIPS\t: 243.75\n"
            "Features\t: fp asimd evtstrm aes sha1 crc32 atomics fphp asimdhp asimddp sve\n"
            "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
            "CPU part\t: 0xd40\nCPU revision\t: 1\n"
            for i in range(4)
        ),
        "/proc/meminfo": meminfo(8 * GIB, 7 * GIB),
        "/proc/self/cgroup": "0::/\n",
        "/etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\n',
    },
    affinity=4,
)


def container(files: dict[str, str], **more: Any) -> Captures:
    """A container on a machine of 32 CPUs and 256 GiB, without a GPU."""
    host = {path: text for path, text in H200.files.items() if path.startswith("/proc/")}
    return Captures(
        system="linux",
        architecture="x86_64",
        files={**host, "/etc/os-release": UBUNTU, **files},
        affinity=more.get("affinity", 32),
    )


# A control group of version 2 as Docker mounts it: the container's own group is the root.
CONTAINER_V2 = container(
    {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
    }
)
# Version 1, whose path names a host folder that does not exist here.
CONTAINER_V1 = container(
    {
        "/proc/self/cgroup": "12:memory:/docker/9f8e\n5:cpu,cpuacct:/docker/9f8e\n1:name=x:/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
)
# A service with MemoryMax= on the host: its limit is below the root.
SERVICE = container(
    {
        "/proc/self/cgroup": "0::/system.slice/mlx.service\n",
        "/sys/fs/cgroup/system.slice/memory.max": "max\n",
        "/sys/fs/cgroup/system.slice/mlx.service/memory.max": f"{6 * GIB}\n",
        "/sys/fs/cgroup/system.slice/mlx.service/cpu.max": "max 100000\n",
    }
)

ALL = {
    "M1": M1,
    "M3 Max": M3_MAX,
    "M5": M5,
    "H200": H200,
    "ARM": ARM,
    "container v2": CONTAINER_V2,
    "container v1": CONTAINER_V1,
    "service": SERVICE,
}
