"""Optional dependencies: errors that name the command which installs a missing one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mlx_paged.errors import MlxPagedError


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Around imports: the error for a missing package names the command that installs it.

    Args:
        extra: the optional dependencies that include it.
        what: what needs it, for the message.

    Raises:
        MlxPagedError: it is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "mlx_paged":
            raise
        raise MlxPagedError(
            f"{what} needs a package that is not installed ({error.name}): "
            f"pip install 'mlx-paged[{extra}]'"
        ) from error
