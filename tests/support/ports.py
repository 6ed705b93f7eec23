"""Free ports on loopback."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Different ports that nothing listens on. Others may take them meanwhile."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
