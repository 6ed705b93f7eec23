"""Opens this engine's end of the connection between two engines."""

from __future__ import annotations

from pathlib import Path

from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError
from mlx_paged.transfer.receiver import Receiver
from mlx_paged.transfer.server import PrefillServer

_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 1 << 16


def ends_of(config: EngineConfig) -> tuple[Receiver | None, PrefillServer | None]:
    """Returns the client of a prefill engine or its server, depending on the role.

    Raises:
        InvalidParameterError: The secret cannot be read, or the address cannot be used.
    """
    if config.role is None:
        return None, None
    secret, address = _secret(config), config.prefill_host_and_port
    if config.role == "decode":
        return Receiver(address, secret), None
    try:
        return None, PrefillServer(address, secret)
    except OSError as error:
        expected = f"an address to listen on ({error.strerror or error})"
        raise InvalidParameterError("prefill_address", expected, config.prefill_address) from error


def _secret(config: EngineConfig) -> bytes:
    given = str(config.prefill_secret_file)
    expected = f"a file of {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes"
    try:
        with Path(given).expanduser().open("rb") as file:
            # Editors and `echo` end a file with a newline.
            secret = file.read(_MAX_SECRET_BYTES + 1).strip()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        expected = f"{expected} ({reason})"
        raise InvalidParameterError("prefill_secret_file", expected, given) from error
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise InvalidParameterError("prefill_secret_file", expected, given)
    return secret
