"""Limit of open files and connections of this process (``RLIMIT_NOFILE``).

On import, mlx-lm sets the soft limit to 2048 and the hard limit to 4096. On most servers that
lowers them, and a lowered hard limit cannot be raised again. If the hard limit is below 4096, the
import fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

from mlx_paged.import_hooks import around_import

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

#: Maximum that `raise_limit` asks for, because a hard limit may be infinite.
MOST = 1 << 20
_MODULE = "mlx_lm.utils"
# Tried in order: macOS rejects values above a kernel limit, even below the hard limit.
_STEPS = (MOST, 65_536, 10_240, 4096)


def keep_limit() -> None:
    """Keeps later imports of mlx-lm from changing the limits."""
    if resource is not None:
        around_import(_MODULE, _guarded)


def limit() -> int:
    """Returns the current soft limit of open descriptors."""
    if resource is None:
        return MOST
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_limit(wanted: int = MOST) -> int:
    """Raises the soft limit to `wanted`, or to the hard limit if that is less; never lowers it.

    Returns:
        The new soft limit.
    """
    if resource is None:
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(wanted, _number(hard))
    for step in (most, *(step for step in _STEPS if step < most)):
        if step <= _number(soft):
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (step, hard))
            break
        except (ValueError, OSError):
            continue
    return limit()


@contextlib.contextmanager
def at_least(wanted: int) -> Iterator[None]:
    """Raises the limit to `wanted` descriptors within the context, if the hard limit allows it."""
    before = limit()
    raised = raise_limit(wanted)
    try:
        yield
    finally:
        if raised != before and limit() == raised:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def _number(value: int) -> int:
    return sys.maxsize if value in (-1, resource.RLIM_INFINITY) else value


def _guarded(module: ModuleType, execute: Callable[[], None]) -> None:
    """Runs the module's own code, but ignores its calls that set the limit."""
    original = resource.setrlimit

    def setrlimit(which: int, limits: tuple[int, int]) -> None:
        # Other threads, and modules that this one imports, can still set limits.
        is_its = sys._getframe(1).f_globals is vars(module)
        if which != resource.RLIMIT_NOFILE or not is_its:
            original(which, limits)

    resource.setrlimit = setrlimit
    try:
        execute()
    finally:
        resource.setrlimit = original
