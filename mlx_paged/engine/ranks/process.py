"""Entry point of the process of a rank other than 0.

Rank 0 runs ``python -m mlx_paged.engine.ranks.process CHANNEL LIFE BACKEND`` with two inherited
sockets. The process tells rank 0 when it runs, when it has imported everything, and when it has
loaded the model. Rank 0 sleeps until then; in MLX, it would take the core that this may need.
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
    """Follows rank 0 in a process that rank 0 started, then exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    numbers, backend = sys.argv[1:3], sys.argv[3]
    sockets = [socket.socket(fileno=int(number)) for number in numbers]
    channel, life = Channel(sockets[0]), sockets[1]
    follow_life(life, os.getppid())
    try:
        # Nothing can interrupt MLX waiting for other ranks, so they join once all are running.
        channel.send(Message(READY).encode())
        channel.receive()
        world = launch.join({}, backend)
    except Exception as error:
        last_words(life, error)
        os._exit(1)
    _follow_and_end(channel, life, world)


def follow_launched() -> NoReturn:
    """Follows rank 0 in a process that `mlx.launch` started, then exits."""
    world = launch.join({}, "any")
    channel, life = launch.connect(world)
    follow_life(life, None)
    _follow_and_end(channel, life, world)


def _follow_and_end(channel: Channel, life: socket.socket, world: mx.distributed.Group) -> NoReturn:
    """Follows rank 0, then exits without interpreter shutdown, where MLX would wait for ranks."""
    from mlx_paged.engine.guard import claim_process
    from mlx_paged.engine.ranks.follow import follow

    status = 1
    try:
        claim_process()
        channel.send(Message(READY).encode())
        follow(channel, world)
        status = 0
    except BaseException as error:
        last_words(life, error)
        logger.debug("this rank failed", exc_info=True)
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
