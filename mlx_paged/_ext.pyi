"""Native primitives of mlx_paged. Use them through mlx_paged.ops."""

from collections.abc import Sequence
from typing import Annotated

import mlx.core
import mlx.core.distributed
import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType


def allocator_function() -> int:
    """
    Address of the replacement for MLX's `allocator()`, which raises when memory runs out.
    """

def make_room() -> None:
    """
    Waits for the CPU's streams and frees MLX's cache. Streams keep their errors.
    """

def join_group(backend: str) -> mlx.core.distributed.Group:
    """
    Connects this process to those that the environment names, as a new group. Waits without the interpreter's lock until all of them have come.
    """

def make_peer_buffer() -> int:
    """
    Makes a buffer of GPU memory for other ranks; returns its address. Raises RuntimeError.
    """

def peer_buffer_handle(buffer: int) -> bytes:
    """
    Returns what another process needs to map a buffer. Raises RuntimeError.
    """

def open_peer_buffer(handle: bytes) -> int:
    """
    Maps the buffer of another process; returns its address here. Raises RuntimeError.
    """

def use_peer_memory(group: mlx.core.distributed.Group, buffers: Sequence[int]) -> None:
    """
    Lets `all_sum` of this group use the buffers of its ranks. Raises ValueError.
    """

def try_peer_memory(group: mlx.core.distributed.Group) -> bool:
    """
    Adds up numbers of all ranks in such memory; returns False if the sum is wrong. Every rank must call it before its first sum.
    """

def forget_peer_memory(group: mlx.core.distributed.Group) -> None:
    """Leaves the sums of a group to MLX again."""

def all_sum(x: mlx.core.array, *, group: mlx.core.distributed.Group, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array:
    """
    The sum of all ranks' x: in memory that their GPUs share, if the group has some and the sum fits, else by MLX.
    """

def write_kv(key_pool: mlx.core.array, value_pool: mlx.core.array, keys: mlx.core.array, values: mlx.core.array, slot_mapping: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> tuple[mlx.core.array, mlx.core.array]: ...

def copy_blocks(pools: Sequence[mlx.core.array], block_pairs: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> list[mlx.core.array]: ...

def gather_kv(key_pool: mlx.core.array, value_pool: mlx.core.array, block_tables: mlx.core.array, context_lens: mlx.core.array, max_context_len: int, *, dtype: mlx.core.Dtype | None = None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> tuple[mlx.core.array, mlx.core.array]: ...

def paged_attention(queries: mlx.core.array, key_pool: mlx.core.array, value_pool: mlx.core.array, positions: mlx.core.array, block_tables: mlx.core.array, work_items: mlx.core.array, merge_items: mlx.core.array, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: mlx.core.array | None = None, alibi_slopes: mlx.core.array | None = None, activations: str = 'float32', stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def apply_token_bitmask(logits: mlx.core.array, bitmask: mlx.core.array, rows: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def edit_logits(logits: mlx.core.array, rows: mlx.core.array, factors: mlx.core.array, entries: mlx.core.array, values: mlx.core.array, newest: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def take_rows(a: mlx.core.array, ids: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def rope_rotations(positions: mlx.core.array, inv_freqs: mlx.core.array, *, scale: float, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def rope(x: mlx.core.array, rotations: mlx.core.array, *, traditional: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def rms_norm(x: mlx.core.array, weight: mlx.core.array | None, eps: float, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def silu_mul(gate: mlx.core.array, x: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def lora(base: mlx.core.array, x: mlx.core.array, adapters: mlx.core.array, a: mlx.core.array, b: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def expert_lora(base: mlx.core.array, x: mlx.core.array, adapters: mlx.core.array, experts: mlx.core.array, a: mlx.core.array, b: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def add_in_product(sum: mlx.core.array) -> mlx.core.array | None: ...

def select_rows(a: mlx.core.array, rows: mlx.core.array, *, kept: Sequence[mlx.core.array], known: Sequence[tuple[mlx.core.array, mlx.core.array]]) -> mlx.core.array: ...

def product_kernels(dtype: mlx.core.Dtype, mode: str, bits: int, num_rows: int) -> list[str]:
    """
    Host names of the kernels that can multiply this many rows outside of whole steps, best first. bits: 0 for dense weights.
    """

def serves_rope(x: mlx.core.array, rotations: mlx.core.array, traditional: bool) -> bool: ...

def serves_silu_mul(gate: mlx.core.array) -> bool: ...

def layer_norm(x: mlx.core.array, weight: mlx.core.array | None, bias: mlx.core.array | None, eps: float, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def gelu(x: mlx.core.array, approximation: str, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def clipped_swiglu(gate: mlx.core.array, x: mlx.core.array, *, alpha: float, limit: float, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def greedy_tokens(logits: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> tuple[mlx.core.array, mlx.core.array, mlx.core.array]: ...

def draw_tokens(logits: mlx.core.array, tokens: mlx.core.array, largest: mlx.core.array, temperature: mlx.core.array, keys: mlx.core.array, thresholds: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def sampling_thresholds(logits: mlx.core.array, largest: mlx.core.array, temperature: mlx.core.array, floors: mlx.core.array, top_k: mlx.core.array, top_p: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def linear(x: mlx.core.array, weight: mlx.core.array, bias: mlx.core.array | None, *, activations: str, by_rows: int, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def activations() -> list[str]: ...

def quantized_linear(x: mlx.core.array, weight: mlx.core.array, scales: mlx.core.array, biases: mlx.core.array | None, bias: mlx.core.array | None, *, group_size: int, bits: int, mode: str, activations: str, by_rows: int, for_program: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def expert_linear(x: mlx.core.array, indices: mlx.core.array, weight: mlx.core.array, scales: mlx.core.array | None, biases: mlx.core.array | None, bias: mlx.core.array | None, global_scale: mlx.core.array | None, *, group_size: int, bits: int, mode: str, for_program: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def sorted_expert_linear(x: mlx.core.array, experts: mlx.core.array, weights: tuple[mlx.core.array, mlx.core.array, mlx.core.array | None, mlx.core.array | None, int, int, str], *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array | None: ...

def expert_glu(x: mlx.core.array, experts: mlx.core.array, gate: tuple[mlx.core.array, mlx.core.array, mlx.core.array | None, mlx.core.array | None, int, int, str], up: tuple[mlx.core.array, mlx.core.array, mlx.core.array | None, mlx.core.array | None, int, int, str], down: tuple[mlx.core.array, mlx.core.array, mlx.core.array | None, mlx.core.array | None, int, int, str], *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array | None: ...

def lookup(ids: mlx.core.array, weight: mlx.core.array, scales: mlx.core.array | None, biases: mlx.core.array | None, *, group_size: int, bits: int, mode: str, for_program: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def supported_step_rows() -> int:
    """Maximum rows of a step for a GpuExecutable; 0 if none is supported."""

def max_gpu_step_rows() -> int:
    """The same, up to what calibration allows."""

def allowed_step_rows() -> int:
    """Maximum rows of such a step that calibration allows."""

def allow_step_rows(num_rows: int) -> None:
    """Sets `allowed_step_rows`."""

def gpu_executable_kernels(executable: CapsuleType) -> list:
    """Host names of its kernels, without those of attention."""

def make_gpu_executable(inputs: Sequence[mlx.core.array], outputs: Sequence[mlx.core.array], *, residual_in_product: bool) -> CapsuleType: ...

def run_gpu_executable(executable: CapsuleType, inputs: Sequence[mlx.core.array], *, returns_pools: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> list[mlx.core.array]: ...

def placeholders(arrays: Sequence[mlx.core.array]) -> list[mlx.core.array]:
    """
    Arrays of the same shapes and dtypes that have no values: evaluating one is an error.
    """

def max_cpu_step_rows() -> int:
    """Maximum rows of a step for a CpuExecutable; 0 if none is supported."""

class CpuExecutable:
    """A graph that runs as one operation on the CPU."""

    def __init__(self, inputs: Sequence[mlx.core.array], outputs: Sequence[mlx.core.array]) -> None: ...

    def __call__(self, inputs: Sequence[mlx.core.array], *, returns_pools: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> list[mlx.core.array]: ...

    @property
    def num_phases(self) -> int: ...

    @property
    def foreign(self) -> list[str]:
        """
        Primitives that MLX runs between the phases because they have no lowering.
        """

class GraphTemplate:
    """A graph that is made again for other sizes."""

    def __init__(self, first_inputs: Sequence[mlx.core.array], first_outputs: Sequence[mlx.core.array], second_inputs: Sequence[mlx.core.array], second_outputs: Sequence[mlx.core.array]) -> None: ...

    def __call__(self, inputs: Sequence[mlx.core.array]) -> list[mlx.core.array]: ...

    @property
    def num_nodes(self) -> int: ...

class ArrayContents:
    """Identifies an array's contents without keeping them alive."""

    def __init__(self, array: mlx.core.array) -> None: ...

    def are_still_of(self, array: mlx.core.array) -> bool:
        """False once the array object has been replaced or updated in place."""

def has_transfers() -> bool:
    """True if `upload` and `to_host` are available."""

def has_wgmma() -> bool:
    """True if this build has warpgroup kernels and this GPU can run them."""

def has_wgmma_prefill(key_dim: int, value_dim: int, block_size: int) -> bool:
    """True if there is a warpgroup kernel for prefill over such pools."""

def max_product_rows() -> int:
    """Maximum rows of a step whose products are our own GPU kernels."""

def upload(arrays: Sequence[Annotated[NDArray, dict(order='C', device='cpu', writable=False)]], *, stays: bool = False, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> list[mlx.core.array]: ...

def plan_attention(tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_blocks: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], context_lens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], query_lens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], *, bounds: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, block_size: int, window: int, rows_per_item: int, split_tokens: int, on_gpu: bool, pads: bool, num_rows: int, shared_rows: int, stays: bool, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> list[mlx.core.array] | None: ...

def token_bytes(ids: list, vocab_size: int) -> bytes | None: ...

def crc32(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int | None:
    """CRC-32 of bytes; None if zlib is as fast on this processor."""

def to_host(array: mlx.core.array, *, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None = None) -> mlx.core.array: ...

def wait_actively(array: mlx.core.array, seconds: float) -> bool: ...

def allocate_pool(shape: Sequence[int], dtype: mlx.core.Dtype) -> mlx.core.array: ...

def pool_copies() -> int:
    """Whole-pool copies made since the process started."""

def accepts(array: mlx.core.array) -> int:
    """
    The array's rank. Fails with TypeError if this extension's nanobind and MLX's do not share their types.
    """

def kernel_names() -> list:
    """Every GPU kernel: host name, file of metal/, template-id."""

def pipelines_to_come() -> list:
    """
    Every GPU pipeline that steps of the layers seen so far can need: host name of the kernel, function constants.
    """

def attention_layers() -> list:
    """
    Kinds of attention layers seen so far: dtype, query heads per KV head, key dim, value dim, options (features_of in metal/attention_variant.h), formats of keys and values.
    """

def attention_kernel(dtype: mlx.core.Dtype, group: int, key_dim: int, value_dim: int, rows: int) -> str:
    """
    Host name of the kernel for items of this many rows; empty if none is left.
    """

def max_shared_rows(queries: mlx.core.array, key_pool: mlx.core.array, value_pool: mlx.core.array, has_alibi: bool) -> int:
    """
    Maximum rows of a sequence that one pass serves with the bits that each has alone.
    """

def reject_kernels(host_names: Sequence[str]) -> None:
    """Replaces the set of kernels that never run."""

def allow_tensor_kernels(allowed: bool) -> None:
    """Lets kernels for tensor units run unless they are rejected."""

def allow_products(products: Sequence[tuple[str, int, int]]) -> None:
    """
    Replaces the kernels that may multiply outside of whole steps: host name, minimum and maximum rows.
    """

def set_piece_tokens(num_tokens: int) -> None:
    """
    Sets the minimum tokens of context per work item of a decode; 0: the built-in number.
    """

def rejected_kernels() -> list:
    """Kernels that never run, by host name."""

def prepare_pipeline(host_name: str, function_constants: Sequence[bool]) -> None:
    """Compiles a pipeline unless that has been done."""

def limit_threads(max_threads: int) -> None:
    """
    Limits the threads of the CPU kernels unless MLX_PAGED_NUM_THREADS is set. Call it before their first use.
    """

def outlast_interpreter() -> None:
    """
    Keeps this thread from destroying MLX's thread-local variables during the exit.
    """

def exit_unless_extended(seconds: float, message: str) -> None:
    """
    Ends the process with status 1 unless this is called again within `seconds`.
    """

def build_info() -> dict:
    """Build options of this extension and its choices at run time."""
