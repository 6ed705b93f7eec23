"""CpuExecutable and GpuExecutable: a step of a model, compiled to a single operation.

Build the graph of the step on `placeholders`, then make an executable of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.extension import ext


def max_cpu_step_rows() -> int:
    """Maximum rows per step for a `CpuExecutable` on this machine; 0 if unsupported.

    Also 0 with ``MLX_PAGED_CHECK=1``, because executables do not check ids, and with Metal until
    calibration found them right and faster (`kernels.allow_step_rows`).
    """
    return ext.max_cpu_step_rows()


def max_gpu_step_rows() -> int:
    """Maximum rows per step for a `GpuExecutable` on this machine; 0 if unsupported.

    Also 0 with ``MLX_PAGED_CHECK=1``, because executables do not check ids, and with Metal until
    calibration found them right and faster (`kernels.allow_step_rows`).
    """
    return ext.max_gpu_step_rows()


def supported_step_rows() -> int:
    """Like `max_gpu_step_rows`, also where calibration has not allowed such steps."""
    return ext.supported_step_rows()


def placeholders(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Returns stand-ins of the same shapes and dtypes to build a graph on. Never evaluate them."""
    return ext.placeholders(list(arrays))


class CpuExecutable:
    """A step of few rows that runs as a single operation on the CPU.

    Its graph is compiled to phases, which run in sequence, each on all threads. Products that share
    an input are one phase.

    It runs these natively, on float32 values whose first axis is the step's rows: the operations of
    `ops`, including `linear`, `quantized_linear`, `expert_linear`, `lookup` and `lora` with weights
    of any format; elementwise arithmetic and some functions; softmax, sums, partitions and lookups
    along a row; and reshapes. Any other MLX operation runs on whole arrays in between, at
    its usual cost.

    Args:
        inputs: `placeholders`. Inputs that only attention reads, such as a plan's block tables,
            work and merges, may have other sizes in a call, and so may unused inputs.
        outputs: Arrays built on the inputs: float32 results, such as logits and the hidden states
            of some layers, followed by pools among the inputs, which are written in place.

    Raises:
        ValueError: The graph is not supported; the message says why. Parts that do not depend on
            the inputs are evaluated once.
    """

    def __init__(self, inputs: Sequence[mx.array], outputs: Sequence[mx.array]) -> None:
        self._executable = ext.CpuExecutable(list(inputs), list(outputs))

    @property
    def foreign(self) -> list[str]:
        """The MLX primitives that have no native form, once for each operation."""
        return self._executable.foreign

    @property
    def num_phases(self) -> int:
        """Number of phases."""
        return self._executable.num_phases

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        returns_pools: bool = True,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        """Runs the step. Consumes the pools among the inputs, like `ops.write_kv`.

        Args:
            returns_pools: False returns the last pool alone, after the results, which saves much
                host time. Then start the evaluation before that of anything built on the other
                input pools: nothing else orders the two.

        Raises:
            ValueError: An input has the wrong shape or dtype.
        """
        return self._executable(list(inputs), returns_pools=returns_pools, stream=stream)


class GpuExecutable:
    """A step as a single GPU operation: a sequence of kernels over persistent memory.

    With CUDA, it is captured as a graph and replayed.

    The graph may contain `linear`, `rms_norm`, `rope_rotations`, `rope`, `silu_mul`, `write_kv`,
    `paged_attention` without bounds, `greedy_tokens` and `lora` of `ops`; additions before a norm
    or after a linear layer, row lookups, all-reduces and all-gathers, and reshapes without copies.

    Args:
        inputs: Arrays from `placeholders`.
        outputs: Arrays built on the inputs: results, such as logits and the hidden states of some
            layers, followed by pools among the inputs, which are written in place. `greedy_tokens`
            puts tokens for the host in the memory of `ops.to_host`.
        residual_in_product: Fuse an addition after a linear layer into that layer if possible;
            otherwise into the norm that follows.

    Raises:
        ValueError: The graph has an unsupported operation; the message names it. Parts that do not
            depend on the inputs are evaluated once.
    """

    def __init__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[mx.array],
        *,
        residual_in_product: bool = True,
    ) -> None:
        self._ext = ext  # only the extension that made the capsule can use it
        self._executable = ext.make_gpu_executable(
            list(inputs), list(outputs), residual_in_product=residual_in_product
        )

    @property
    def kernels(self) -> list[str]:
        """Names of its kernels, without those of attention."""
        return list(self._ext.gpu_executable_kernels(self._executable))

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        returns_pools: bool = True,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        """Runs the step. Consumes the pools among the inputs, like `ops.write_kv`.

        Args:
            returns_pools: False returns only the results, which saves much host time. Then start
                the evaluation of the results, for example with `mx.async_eval`, before that of
                anything built on the input pools: nothing else orders the two.

        Raises:
            ValueError: An input has the wrong shape or dtype.
        """
        return self._ext.run_gpu_executable(
            self._executable, list(inputs), returns_pools=returns_pools, stream=stream
        )


class GraphTemplate:
    """A graph that model code has built, to make again for inputs of other sizes.

    Learns from two graphs of the same code on inputs of two sizes. An extent that differs between
    both inputs is a *size*; all extents that have the same two values are one. The graph may have
    any primitives whose parameters do not depend on a size, and reshapes, broadcasts and slices. A
    graph made again shares its primitives and constants, such as weights, with the first one.

    Args:
        first_inputs, second_inputs: `placeholders`, each with the smallest and the largest size.
        first_outputs, second_outputs: Arrays built on them.

    Raises:
        ValueError: The two graphs differ in more than sizes; the message says why.
    """

    def __init__(
        self,
        first_inputs: Sequence[mx.array],
        first_outputs: Sequence[mx.array],
        second_inputs: Sequence[mx.array],
        second_outputs: Sequence[mx.array],
    ) -> None:
        self._template = ext.GraphTemplate(
            list(first_inputs), list(first_outputs), list(second_inputs), list(second_outputs)
        )

    @property
    def num_nodes(self) -> int:
        """Number of operations that depend on the inputs."""
        return self._template.num_nodes

    def __call__(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Returns the outputs of a new graph on these inputs, without evaluating it.

        Raises:
            ValueError: An input has another dtype, or an extent that differs from the graph's and
                is no size of it.
        """
        return self._template(list(inputs))
