"""Optional dependencies: turns a missing one into an error that names the install command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mlx_paged.errors import MlxPagedError


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Wraps imports of optional packages; the error for a missing one names the install command.

    Args:
        extra: The extra that includes the package.
        what: The feature that needs it, for the message.

    Raises:
        MlxPagedError: The package is missing.
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
