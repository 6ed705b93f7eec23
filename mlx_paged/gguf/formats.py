"""Recodes blocks of GGUF as MLX's quantized arrays, without a change of values where that is
possible.

A block of Q4_0 to Q8_0 has one scale (and minimum) for 32 codes, like a group of MLX's affine
formats: only the order of the codes changes. Blocks of Q4_K and Q5_K have 8 such groups, whose
scales are products of a float16 and a 6-bit number; float32 holds these products exactly. Groups of
Q2_K, Q3_K and Q6_K have 16 elements, fewer than any group of MLX's: two of them become one of 8
bits, which rounds. MXFP4 is MLX's format of the same name.

| type       | MLX                          | dtype of scales | values      |
|------------|------------------------------|-----------------|-------------|
| Q4_0, Q4_1 | affine, 4 bits, groups of 32 | float16         | the same    |
| Q5_0, Q5_1 | affine, 5 bits, groups of 32 | float16         | the same    |
| Q8_0       | affine, 8 bits, groups of 32 | float16         | the same    |
| Q4_K       | affine, 4 bits, groups of 32 | float32         | the same    |
| Q5_K       | affine, 5 bits, groups of 32 | float32         | the same    |
| MXFP4      | mxfp4, 4 bits, groups of 32  | uint8           | the same    |
| Q6_K, Q3_K, Q2_K | affine, 8 bits, groups of 32 | float16   | rounded     |
| F32, F16, BF16 | plain                    |                 | the same    |

Layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial

from mlx_paged import extension  # noqa: F401  checks the extension, and loads BLAS, before mlx

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.types import Tensor

GROUP = 32
#: Types that become plain arrays.
PLAIN = ("F32", "F16", "BF16")
#: Elements to recode together: temporary arrays fit a core's cache.
_RECODED = 1 << 18
_HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Packed:
    """A quantized array of MLX.

    Attributes:
        weight: ``[..., columns * bits / 32]`` uint32.
        scales: ``[..., columns / 32]`` float16 or float32; uint8 for mxfp4.
        biases: Like `scales`; None for mxfp4.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    mode: str = "affine"

    @property
    def parameters(self) -> dict[str, int | str]:
        """The format, as ``config.json`` names it."""
        return {"group_size": GROUP, "bits": self.bits, "mode": self.mode}


@dataclass
class Rounding:
    """Measures the difference between stored and loaded values of one type.

    Attributes:
        tensors: Number of tensors that were rounded.
    """

    tensors: int = 0
    _squares: float = field(default=0.0, repr=False)
    _errors: float = field(default=0.0, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, stored: np.ndarray, loaded: np.ndarray) -> None:
        """Adds float32 values before and after rounding; `loaded` is overwritten."""
        loaded -= stored
        squares, errors = (float(np.vdot(x, x)) for x in (stored, loaded))
        with self._lock:
            self._squares += squares
            self._errors += errors

    @property
    def relative_error(self) -> float:
        """RMS error relative to the RMS of the values."""
        return math.sqrt(self._errors / self._squares) if self._squares else 0.0


def require_supported(tensor: Tensor) -> None:
    """Refuses a tensor of a type that cannot be loaded.

    Raises:
        GGUFError: It names the type.
    """
    name = tensor.type.name
    if name in PLAIN or name in _EXACT or name in _VALUES:
        return
    kind = "codebooks" if name.startswith("IQ") else "a format"
    raise GGUFError(
        f"its tensor {tensor.name!r} is quantized as {name}, {kind} that MLX does not have; take "
        "a file in Q4_K_M, Q5_K_M, Q6_K, Q8_0, Q4_0 or F16"
        if tensor.type.is_quantized
        else f"its tensor {tensor.name!r} has the type {name}, which is not a type of weights"
    )


class Scratch:
    """Arrays that are used again for every tensor: fresh memory costs more than recoding."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Returns an array with any contents, which replaces the last one of this name."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


def pack(
    tensor: Tensor,
    rounding: dict[str, Rounding] | None = None,
    scratch: Scratch | None = None,
) -> Packed:
    """Returns a quantized tensor as a quantized array.

    Args:
        rounding: Collects errors by type, of types that MLX cannot hold exactly.
        scratch: Memory to use.

    Raises:
        GGUFError: Its type has no such array.
    """
    require_supported(tensor)
    name = tensor.type.name
    if name in _EXACT:
        return _recoded(tensor, _EXACT[name], scratch)
    if name in _VALUES:
        measure = None if rounding is None else rounding.setdefault(name, Rounding())
        kind = _Kind(partial(_rounded, _VALUES[name], measure), 8)
        found = _recoded(tensor, kind, scratch)
        if measure is not None:
            measure.tensors += 1
        return found
    raise GGUFError(f"its tensor {tensor.name!r} has the type {name}, which is not quantized")


def plain(tensor: Tensor) -> mx.array:
    """Returns a tensor of 16 or 32 bits as it is, and a quantized one in float32.

    Raises:
        GGUFError: Its type is not supported.
    """
    require_supported(tensor)
    name = tensor.type.name
    if name in PLAIN:
        array = tensor.rows.view(_NUMPY[name])
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        found = mx.array(array)
        return found.view(mx.bfloat16) if name == "BF16" else found
    return mx.array(values(tensor))


def values(tensor: Tensor) -> np.ndarray:
    """Returns a tensor's values: float32 of its shape.

    Raises:
        GGUFError: Its type is not supported.
    """
    require_supported(tensor)
    name = tensor.type.name
    if name == "BF16":
        bits = tensor.rows.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32)
    if name in PLAIN:
        return tensor.rows.view(_NUMPY[name]).astype(np.float32)
    if name in _VALUES:
        return _VALUES[name](tensor.blocks).reshape(tensor.shape)
    packed = _recoded(tensor, _EXACT[name])
    wide = None if packed.biases is None else packed.biases.astype(mx.float32)
    scales = packed.scales if wide is None else packed.scales.astype(mx.float32)
    found = mx.dequantize(
        packed.weight,
        scales,
        wide,
        group_size=GROUP,
        bits=packed.bits,
        mode=packed.mode,
        dtype=mx.float32,
    )
    return np.array(found)


_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


# --- Types that MLX holds exactly -----------------------------------------------------------------

#: The parts of a group of 32: codes ``[..., 4 * bits]`` uint8, a scale, and a bias (None: no bias).
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class _Kind:
    """A type as a quantized array of MLX.

    Attributes:
        recode: Returns parts ``[n, groups, ...]`` for blocks ``[n, nbytes]`` uint8.
        dtype: That of scales and biases, float32 where these are too large for float16.
    """

    recode: Callable[[np.ndarray], Parts]
    bits: int
    dtype: type[np.generic] = np.float16
    mode: str = "affine"


def _recoded(tensor: Tensor, kind: _Kind, scratch: Scratch | None = None) -> Packed:
    """Recodes a tensor in chunks, on all cores."""
    scratch = scratch or Scratch()
    blocks = tensor.rows.reshape(-1, tensor.type.nbytes)
    groups = tensor.type.block // GROUP
    codes = scratch.array("codes", (len(blocks), groups, 4 * kind.bits), np.uint8)
    scales = scratch.array("scales", (len(blocks), groups), kind.dtype)
    biases = None if kind.mode == "mxfp4" else scratch.array("biases", scales.shape, kind.dtype)
    too_large: list[bool] = []

    def recode(part: slice) -> None:
        codes[part], scales[part], bias = kind.recode(blocks[part])
        if biases is None or bias is None:
            return
        if bias.dtype == np.float32 and biases.dtype == np.float16:
            too_large.append(True)
            return
        biases[part] = bias

    step = max(1, _RECODED // (tensor.type.block))
    parts = [slice(first, first + step) for first in range(0, len(blocks), step)]
    list(_workers().map(recode, parts) if len(parts) > 1 else map(recode, parts))
    if too_large:
        _, scales, biases = kind.recode(blocks)
        assert biases is not None
        scales = scales.astype(np.float32)
    shape = (*tensor.shape[:-1], tensor.columns // GROUP)
    words = codes.view(np.uint32).reshape(*shape[:-1], -1)
    return Packed(
        mx.array(words),
        mx.array(scales.reshape(shape)),
        None if biases is None else mx.array(biases.reshape(shape)),
        kind.bits,
        kind.mode,
    )


@lru_cache(maxsize=1)
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "gguf")


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at an even byte of each block: ``[n, 1]``."""
    return blocks.view("<f2")[:, at // 2 : at // 2 + 1]


def _bytes(blocks: np.ndarray, first: int, last: int) -> np.ndarray:
    """Copies a range of each block's bytes: ``[n, last - first]``.

    One element for each run of bytes: numpy copies these much faster than short rows.
    """
    fields = np.dtype(
        {
            "names": ["run"],
            "formats": [f"V{last - first}"],
            "offsets": [first],
            "itemsize": blocks.shape[1],
        }
    )
    return blocks.view(fields)["run"].copy().view(np.uint8)


def _interleaved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Stacks rows: two of ``[..., n]`` uint8 become ``[..., 2, n]``."""
    run = f"V{first.shape[-1]}"
    found = np.empty((*first.shape[:-1], 2), run)
    found[..., 0], found[..., 1] = first.view(run)[..., 0], second.view(run)[..., 0]
    return found.view(np.uint8).reshape(*first.shape[:-1], 2, first.shape[-1])


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Reorders nibbles: all low ones of the bytes, then all high ones, to pairs of neighbors.

    Args:
        packed: ``[..., n]`` uint8, contiguous.

    Returns:
        ``[..., 2, n / 2]`` uint8: codes of MLX's 4 bits.
    """
    wide = packed.view("<u2")
    second = wide >> 4
    first = second & 0xF0
    first |= wide & 0x0F
    second &= 0x0F
    second |= (wide >> 8) & 0xF0
    return _interleaved(first.astype(np.uint8), second.astype(np.uint8))


def _five_bits(codes: np.ndarray) -> np.ndarray:
    """Packs codes of 5 bits: ``[..., 32]`` uint8 to ``[..., 20]``."""
    pairs = codes.view("<u2")
    pairs = (pairs & 31) | ((pairs >> 3) & (31 << 5))
    fours = pairs.view("<u4")
    fours = (fours & 0x3FF) | ((fours >> 6) & (0x3FF << 10))
    eights = fours.view("<u8")
    eights = (eights & 0xFFFFF) | ((eights >> 12) & (0xFFFFF << 20))
    return _bytes(eights.reshape(-1, 1).view(np.uint8), 0, 5).reshape(*codes.shape[:-1], 20)


def _with_bits(nibbles: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes of 5 bits: low nibbles of ``[..., n]`` bytes, then high ones, and the highest bits.

    Args:
        high: ``[..., 2, n]`` uint8: 0 or 16.
    """
    codes = _interleaved(nibbles & 15, nibbles >> 4)
    codes |= high
    return codes


def _times(scales: np.ndarray, exponent: int) -> np.ndarray:
    """Returns ``-scales * 2**exponent``: float16, or float32 if that is too small for a product."""
    bits = scales.view("<u2")
    magnitudes = bits & 0x7C00
    if magnitudes.min() > 0 and magnitudes.max() < 0x7C00 - (exponent << 10):
        # The exponent grows and the sign changes. numpy's arithmetic in float16 is slow.
        return ((bits ^ 0x8000) + np.uint16(exponent << 10)).view(np.float16)
    found = scales.astype(np.float32) * np.float32(-(2**exponent))
    return found if np.abs(found).max() > _HALF_MAX else found.astype(np.float16)


def _q4_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    return _nibbles(_bytes(blocks, 2, 18)).reshape(-1, 1, 16), scales, _times(scales, 3)


def _q4_1(blocks: np.ndarray) -> Parts:
    codes = _nibbles(_bytes(blocks, 4, 20)).reshape(-1, 1, 16)
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _five(high: np.ndarray, nibbles: np.ndarray) -> np.ndarray:
    """Codes of Q5_0 and Q5_1: ``[n, 1, 20]``."""
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    bits <<= 4
    codes = _with_bits(nibbles, bits.reshape(-1, 2, 16))
    return _five_bits(codes.reshape(-1, 1, 32))


def _q5_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    codes = _five(_bytes(blocks, 2, 6), _bytes(blocks, 6, 22))
    return codes, scales, _times(scales, 4)


def _q5_1(blocks: np.ndarray) -> Parts:
    codes = _five(_bytes(blocks, 4, 8), _bytes(blocks, 8, 24))
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Parts:
    scales = _halves(blocks, 0)
    codes = _bytes(blocks, 2, 34)
    codes ^= 0x80
    return codes[:, None], scales, _times(scales, 7)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 groups in a block of Q4_K or Q5_K: ``[n, 8]`` float32, exact."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    halves = blocks.view("<f2")[:, :2].astype(np.float32)
    return scales * halves[:, :1], minima * -halves[:, 1:]


def _q4_k(blocks: np.ndarray) -> Parts:
    # The low nibbles of 32 bytes are one group, and the high nibbles the next.
    codes = _nibbles(_bytes(blocks, 16, 144).reshape(-1, 4, 32))
    return codes.reshape(-1, 8, 16), *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Parts:
    high = _bytes(blocks, 16, 48)
    # Bit i of the 32 bytes belongs to group i.
    bits = np.stack([(high >> i) & 1 for i in range(8)], axis=1)
    bits <<= 4
    nibbles = _bytes(blocks, 48, 176).reshape(-1, 4, 32)
    codes = _with_bits(nibbles, bits.reshape(-1, 4, 2, 32))
    return _five_bits(codes.reshape(-1, 8, 32)), *_k_scales(blocks)


def _mxfp4(blocks: np.ndarray) -> Parts:
    return _nibbles(_bytes(blocks, 1, 17)).reshape(-1, 1, 16), blocks[:, :1], None


_EXACT: dict[str, _Kind] = {
    "Q4_0": _Kind(_q4_0, 4),
    "Q4_1": _Kind(_q4_1, 4),
    "Q5_0": _Kind(_q5_0, 5),
    "Q5_1": _Kind(_q5_1, 5),
    "Q8_0": _Kind(_q8_0, 8),
    "Q4_K": _Kind(_q4_k, 4, np.float32),
    "Q5_K": _Kind(_q5_k, 5, np.float32),
    "MXFP4": _Kind(_mxfp4, 4, np.uint8, "mxfp4"),
}


# --- Types with groups of 16 ----------------------------------------------------------------------


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block: ``[..., 1]`` float32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Values ``[..., 256]`` float32 of blocks."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 2, 32)
    low = np.stack([low & 15, low >> 4], axis=-3)  # [..., half, nibble, 2, 32]
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(2, 2, 1)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 1, 32)
    codes = (low | (((high >> shifts) & 3) << 4)).astype(np.int8) - 32
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
    scales *= _scale(blocks, 208)
    return _scaled(codes, scales)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low, packed = blocks[..., 32:96], blocks[..., 96:108]
    first, second = packed[..., :8], packed[..., 8:]
    nibbles = np.concatenate([first & 15, first >> 4], axis=-1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    scales = (nibbles | (((np.tile(second, 4) >> shifts) & 3) << 4)).astype(np.int8) - 32
    codes = _two_bits(low)  # [..., 8, 32]
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    signed = codes.astype(np.int8) - ((high ^ 1) << 2).astype(np.int8)
    scale = scales.astype(np.float32) * _scale(blocks, 108)
    return _scaled(signed, scale)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[..., :16]
    scale = (packed & 15).astype(np.float32) * _scale(blocks, 80)
    minimum = (packed >> 4).astype(np.float32) * _scale(blocks, 82)
    found = _scaled(_two_bits(blocks[..., 16:80]), scale).reshape(*scale.shape, 16)
    return (found - minimum[..., None]).reshape(*blocks.shape[:-1], 256)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Codes ``[..., 8, 32]`` of 64 bytes: bits 0 and 1 of 32 bytes, then bits 2 and 3 and so on."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (packed.reshape(*packed.shape[:-1], 2, 1, 32) >> shifts) & 3
    return codes.reshape(*packed.shape[:-1], 8, 32)


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values ``[..., 256]`` of codes and 16 scales."""
    groups = codes.reshape(*scales.shape, 16).astype(np.float32)
    groups *= scales[..., None]
    return groups.reshape(*scales.shape[:-1], 256)


#: Functions that return values of blocks.
_VALUES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
}


def _rounded(
    read: Callable[[np.ndarray], np.ndarray], measure: Rounding | None, blocks: np.ndarray
) -> Parts:
    """Rounds blocks to 8 bits in groups of 32."""
    stored = read(blocks).reshape(-1, GROUP)
    low, high = stored.min(axis=-1), stored.max(axis=-1)
    biases = low.astype(np.float16)
    bias = biases.astype(np.float32)[:, None]
    # Rounded up, so that the largest value is in range.
    scales = np.nextafter(((high - bias[:, 0]) / 255).astype(np.float16), np.float16(np.inf))
    scale = scales.astype(np.float32)[:, None]
    found = (stored - bias) / scale
    np.rint(found, out=found)
    np.clip(found, 0, 255, out=found)
    codes = found.astype(np.uint8)
    if measure is not None:
        found *= scale
        found += bias
        measure.add(stored, found)
    shape = (len(blocks), -1)
    return codes.reshape(len(blocks), -1, GROUP), scales.reshape(shape), biases.reshape(shape)


assert sys.byteorder == "little", "MLX runs on little-endian machines only"
