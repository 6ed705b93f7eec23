"""What a machine has, whatever system it runs."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.cgroups import Limits
from mlx_paged.doctor.apple import Chip


@dataclass(frozen=True)
class CoreGroup:
    """Cores of one kind: "Performance" and "Efficiency" on Apple's chips."""

    name: str
    count: int


@dataclass(frozen=True)
class Gpu:
    """A GPU; None is what the machine does not say.

    Attributes:
        memory_bytes: Its own memory; None where it shares the main memory.
        compute_capability: NVIDIA's, "9.0".
    """

    name: str
    vendor: str
    cores: int | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Machine:
    """Hardware and operating system; None is what the machine does not say.

    Attributes:
        system: "macOS 15.1 (24B83)" or a Linux distribution.
        system_version: Its number alone: "15.1".
        architecture: Of the processor: "arm64", "aarch64", "x86_64".
        core_groups: Physical cores by kind.
        affinity: CPUs that this process may run on.
        instruction_sets: SIMD extensions that the CPU kernels have builds for or could use.
        is_translated: Rosetta 2 runs this process: an x86 Python on an Apple chip.
        cuda_version: Newest one that the NVIDIA driver can serve.
    """

    system: str
    system_version: str | None
    kernel: str
    architecture: str
    chip: str | None
    model: str | None
    core_groups: tuple[CoreGroup, ...]
    logical_cores: int | None
    affinity: int | None
    instruction_sets: tuple[str, ...]
    memory_bytes: int | None
    available_bytes: int | None
    limits: Limits
    gpus: tuple[Gpu, ...]
    cuda_version: str | None
    published: Chip | None
    is_translated: bool = False

    @property
    def physical_cores(self) -> int | None:
        """All kinds together."""
        return sum(group.count for group in self.core_groups) or None

    @property
    def usable_cpus(self) -> float | None:
        """CPUs' worth of time that this process can get."""
        known = [n for n in (self.logical_cores, self.affinity, self.limits.cpus) if n is not None]
        return min(known, default=None)

    @property
    def usable_memory(self) -> int | None:
        """Bytes of main memory that this process may use."""
        known = [n for n in (self.memory_bytes, self.limits.memory_bytes) if n is not None]
        return min(known, default=None)

    @property
    def is_mac(self) -> bool:
        """Whether it runs macOS."""
        return self.system.startswith("macOS")
