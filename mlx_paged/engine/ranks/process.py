"""The process of another rank than 0.

``python -m mlx_paged.engine.ranks.process CHANNEL LIFE BACKEND``: rank 0 starts it so, with two
inherited sockets. It joins the ranks before it imports all else, because rank 0 waits for that.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import NoReturn

from mlx_paged.engine.ranks import launch
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.life import follow_life, last_words
from mlx_paged.engine.ranks.messages import READY, Message

# isort: split
import mlx.core as mx

logger = logging.getLogger(__name__)


def main() -> None:
    """Follows rank 0 in a process that rank 0 started, and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    numbers, backend = sys.argv[1:3], sys.argv[3]
    sockets = [socket.socket(fileno=int(number)) for number in numbers]
    channel, life = Channel(sockets[0]), sockets[1]
    follow_life(life, os.getppid())
    try:
        # Nothing can end MLX's waiting for other ranks. So they join when all of them are here.
        channel.send(Message(READY).encode())
        channel.receive()
        collective = launch.join({}, backend)
    except Exception as error:
        last_words(life, error)
        os._exit(1)
    _follow_and_end(channel, life, collective)


def follow_launched() -> NoReturn:
    """Follows rank 0 in a process that `mlx.launch` started, and ends it."""
    collective = launch.join({}, "any")
    channel, life = launch.connect(collective)
    follow_life(life, None)
    _follow_and_end(channel, life, collective)


def _follow_and_end(
    channel: Channel, life: socket.socket, collective: mx.distributed.Group
) -> NoReturn:
    """Ends without the interpreter's own end, in which MLX would wait for other ranks."""
    from mlx_paged.engine.guard import claim_process
    from mlx_paged.engine.ranks.follow import follow

    status = 1
    try:
        claim_process()
        follow(channel, collective)
        status = 0
    except BaseException as error:
        last_words(life, error)
        logger.debug("this rank failed", exc_info=True)
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
