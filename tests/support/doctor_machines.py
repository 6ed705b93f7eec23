"""What machines of several kinds say of themselves: outputs in the form that the programs have."""

from __future__ import annotations

import json
from typing import Any

from mlx_paged.doctor.capture import Captures

GIB = 1 << 30


def mac(
    chip: str,
    performance: int,
    efficiency: int,
    gpu_cores: int,
    memory: int,
    *,
    version: str = "15.1",
    build: str = "24B83",
    model: str = "Mac16,1",
    names: tuple[str, str] = ("Performance", "Efficiency"),
    translated: bool = False,
) -> Captures:
    cores = performance + efficiency
    sysctl = [
        f"hw.model: {model}",
        f"hw.memsize: {memory}",
        f"hw.physicalcpu: {cores}",
        f"hw.logicalcpu: {cores}",
        "hw.nperflevels: 2",
        f"hw.perflevel0.name: {names[0]}",
        f"hw.perflevel0.physicalcpu: {performance}",
        f"hw.perflevel1.name: {names[1]}",
        f"hw.perflevel1.physicalcpu: {efficiency}",
        f"machdep.cpu.brand_string: {chip}",
        f"sysctl.proc_translated: {int(translated)}",
        "iogpu.wired_limit_mb: 0",
    ]
    display = {
        "_name": chip,
        "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
        "spdisplays_ndrvs": [{"_name": "Color LCD", "_spdisplays_pixels": "3024 x 1964"}],
        "spdisplays_vendor": "sppci_vendor_Apple",
        "sppci_bus": "spdisplays_builtin",
        "sppci_cores": str(gpu_cores),
        "sppci_device_type": "spdisplays_gpu",
        "sppci_model": chip,
    }
    versions = f"ProductName:\t\tmacOS\nProductVersion:\t\t{version}\nBuildVersion:\t\t{build}\n"
    return Captures(
        system="darwin",
        architecture="x86_64" if translated else "arm64",
        kernel="24.1.0",
        commands={
            "sysctl": "\n".join(sysctl) + "\n",
            "sw_vers": versions,
            "system_profiler": json.dumps({"SPDisplaysDataType": [display]}),
        },
    )


M1 = mac("Apple M1", 4, 4, 8, 16 * GIB, version="14.7.1", build="23H222", model="MacBookAir10,1")
M3_MAX = mac("Apple M3 Max", 12, 4, 40, 128 * GIB, model="Mac15,9")
M4_PRO = mac("Apple M4 Pro", 10, 4, 20, 48 * GIB, model="Mac16,8")
M5 = mac("Apple M5", 4, 6, 10, 32 * GIB, version="26.1", build="25B78", model="Mac17,2")


def x86_cpuinfo(name: str, sockets: int, cores: int, threads: int, flags: str) -> str:
    blocks, number = [], 0
    for _ in range(threads):
        for socket in range(sockets):
            for core in range(cores):
                blocks.append(
                    f"processor\t: {number}\nvendor_id\t: GenuineIntel\nmodel name\t: {name}\n"
                    f"physical id\t: {socket}\ncore id\t\t: {core}\nflags\t\t: {flags}\n"
                )
                number += 1
    return "\n".join(blocks)


AVX512 = "fpu sse2 fma f16c avx avx2 avx512f avx512dq avx512bw avx512vl amx_tile avx512_bf16"


def meminfo(total: int, available: int) -> str:
    return (
        f"MemTotal:       {total // 1024} kB\nMemFree:        {available // 2048} kB\n"
        f"MemAvailable:   {available // 1024} kB\nHugePages_Total:       0\n"
    )


UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\n'

H200 = Captures(
    system="linux",
    architecture="x86_64",
    kernel="6.8.0-87-generic",
    commands={
        "nvidia-smi": "NVIDIA H200, 143771, 580.95.05, 9.0\nNVIDIA H200, 143771, 580.95.05, 9.0\n",
        "nvidia-smi-header": "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05   "
        "CUDA Version: 13.0     |\n",
    },
    files={
        "/proc/cpuinfo": x86_cpuinfo("Intel(R) Xeon(R) Platinum 8481C", 2, 8, 2, AVX512),
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
    kernel="6.1.0-30-arm64",
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
        kernel="6.8.0-87-generic",
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
# Version 1, where the path is the host's and does not exist here.
CONTAINER_V1 = container(
    {
        "/proc/self/cgroup": "12:memory:/docker/9f8e\n5:cpu,cpuacct:/docker/9f8e\n1:name=x:/\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
)
# A service with MemoryMax= on the host: its limit lies below the root, where nobody looks.
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
    "M4 Pro": M4_PRO,
    "M5": M5,
    "H200": H200,
    "ARM": ARM,
    "container v2": CONTAINER_V2,
    "container v1": CONTAINER_V1,
    "service": SERVICE,
}
