"""Apple's chips for Macs: GPU cores and memory bandwidth, with the source of each figure.

Bandwidths are those that Apple publishes, in GB/s (10^9 bytes). A chip that is not here, or whose
figure could not be confirmed, is said to be unknown; nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NEWSROOM = "apple.com/newsroom"
_M1_PRO = f"{_NEWSROOM}/2021/10 (M1 Pro and M1 Max)"
_M1_ULTRA = f"{_NEWSROOM}/2022/03 (M1 Ultra)"
_M2 = f"{_NEWSROOM}/2022/06 (M2)"
_M2_PRO = f"{_NEWSROOM}/2023/01 (M2 Pro and M2 Max)"
_M2_ULTRA = f"{_NEWSROOM}/2023/06 (M2 Ultra)"
_M3 = f"{_NEWSROOM}/2023/10 (M3 family); tech specs of the MacBook Pro, 2023"
_M3_ULTRA = f"{_NEWSROOM}/2025/03 (M3 Ultra); tech specs of the Mac Studio, 2025"
_M4 = f"{_NEWSROOM}/2024/10 (M4 family); tech specs of the MacBook Pro, 2024"
_M5 = f"{_NEWSROOM}/2025/10 (M5)"
_M5_PRO = f"{_NEWSROOM}/2026/03 (M5 Pro and M5 Max)"


@dataclass(frozen=True)
class Chip:
    """A chip as Apple sells it with some number of GPU cores.

    Attributes:
        bandwidth: Of the unified memory, in GB/s; None: not confirmed.
        source: Where the figures are published.
    """

    name: str
    gpu_cores: int
    bandwidth: float | None
    source: str


def _variants(name: str, bandwidth: dict[int, float | None], source: str) -> list[Chip]:
    return [Chip(name, cores, speed, source) for cores, speed in bandwidth.items()]


CHIPS: tuple[Chip, ...] = (
    # Apple gave no figure for the first one: LPDDR4X-4266 on 128 bits, and "M1 Pro has nearly
    # three times its bandwidth".
    *_variants("M1", {7: 68.3, 8: 68.3}, "128 bits of LPDDR4X-4266; " + _M1_PRO),
    *_variants("M1 Pro", {14: 200, 16: 200}, _M1_PRO),
    *_variants("M1 Max", {24: 400, 32: 400}, _M1_PRO),
    *_variants("M1 Ultra", {48: 800, 64: 800}, _M1_ULTRA),
    *_variants("M2", {8: 100, 10: 100}, _M2),
    *_variants("M2 Pro", {16: 200, 19: 200}, _M2_PRO),
    *_variants("M2 Max", {30: 400, 38: 400}, _M2_PRO),
    *_variants("M2 Ultra", {60: 800, 76: 800}, _M2_ULTRA),
    *_variants("M3", {8: 100, 10: 100}, _M3),
    *_variants("M3 Pro", {14: 150, 18: 150}, _M3),
    *_variants("M3 Max", {30: 300, 40: 400}, _M3),
    *_variants("M3 Ultra", {60: 819, 80: 819}, _M3_ULTRA),
    *_variants("M4", {8: 120, 10: 120}, _M4),
    *_variants("M4 Pro", {16: 273, 20: 273}, _M4),
    *_variants("M4 Max", {32: 410, 40: 546}, _M4),
    *_variants("M5", {8: 153, 10: 153}, _M5),
    *_variants("M5 Pro", {16: 307, 20: 307}, _M5_PRO),
    # Apple publishes "up to 614"; the figure of the smaller one is not confirmed.
    *_variants("M5 Max", {32: None, 40: 614}, _M5_PRO),
)


def find(brand: str, gpu_cores: int | None) -> Chip | None:
    """The chip of a processor's brand string; None for one that is not in the table.

    Args:
        brand: as sysctl has it, "Apple M3 Max".
        gpu_cores: as the machine says; None where it does not, and then a bandwidth is given only
            if all variants have the same.
    """
    name = re.sub(r"^Apple\s+", "", brand.strip())
    variants = [chip for chip in CHIPS if chip.name == name]
    for chip in variants:
        if chip.gpu_cores == gpu_cores:
            return chip
    if not variants or gpu_cores is not None:
        return None
    first = variants[0]
    same = all(chip.bandwidth == first.bandwidth for chip in variants)
    return Chip(name, 0, first.bandwidth if same else None, first.source)
