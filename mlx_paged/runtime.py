"""What native code offers besides operations on arrays: waiting, memory, the interpreter's end."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_paged.extension import ext


def wait_actively(array: mx.array, seconds: float) -> bool:
    """Busy-waits for an array whose evaluation has begun, without the GIL.

    Returns early if another thread or process was scheduled on this thread's core.

    Args:
        seconds: Timeout, 0 to 1e6.

    Returns:
        False if another one was scheduled; slices under half a millisecond do not count.
    """
    return ext.wait_actively(array, seconds)


def make_room() -> None:
    """Waits for the work queued on CPU streams, and frees the memory that MLX caches.

    Like `mx.clear_cache`, but an error in a stream stays with its arrays. `mx.clear_cache` would
    raise it, and code that waits for those arrays would not see it.

    Also corrects MLX's count of active tasks: after an error in a stream, it includes tasks that
    were never queued, and later evaluations would wait for them forever.
    """
    ext.make_room()


def outlast_interpreter() -> None:
    """Makes this thread wait, if it ends while the interpreter exits, for the process to end.

    Call it after reading `mx.random.state` on this thread.
    """
    ext.outlast_interpreter()


def exit_unless_extended(seconds: float, message: str) -> None:
    """Prints `message` to stderr and ends the process with status 1, unless this is called again
    within `seconds`, again and again.

    It ends a process that hangs where no Python runs: in a call that holds the GIL, or while the
    interpreter or the process exits.

    Raises:
        ValueError: `seconds` is not positive.
    """
    ext.exit_unless_extended(seconds, message)


class ArrayContents(Protocol):
    """See `array_contents`."""

    def are_still_of(self, array: mx.array, /) -> bool:
        """True if `array` still has these contents."""


def array_contents(array: mx.array) -> ArrayContents:
    """Identifies the current contents of `array` without keeping them alive.

    ``array_contents(a).are_still_of(a)`` becomes False once `a` is updated in place, as in
    ``a -= b`` or ``a[...] = b``, and is False for another array. Writes outside of MLX are not
    detected.
    """
    return ext.ArrayContents(array)
