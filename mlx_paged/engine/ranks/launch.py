"""Creates the ranks: starts processes on this machine, or joins those that `mlx.launch` started.

On one machine, ranks communicate over MLX's ring on loopback, or with NVIDIA GPUs over NCCL with
one visible GPU each. MLX cannot split a ring, so subgroups are separate rings. Messages go through
inherited socket pairs, so no other process can connect. Under `mlx.launch` they go over TCP: rank 0
listens at the address in its host file, and a collective tells the others the port and a secret
that each connection must send first.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_paged import private_folder
from mlx_paged.engine.ranks.channel import Channel
from mlx_paged.engine.ranks.life import Follower
from mlx_paged.environment import kept_environment
from mlx_paged.errors import EngineDeadError, InvalidParameterError
from mlx_paged.extension import ext
from mlx_paged.platform import Platform

_LOOPBACK = "127.0.0.1"
_PROCESS = "mlx_paged.engine.ranks.process"
_SECRET_BYTES = 32
_GREETING = struct.Struct(f"<{_SECRET_BYTES}sIB")  # secret, rank, _CHANNEL or _LIFE
_CHANNEL, _LIFE = 0, 1
_CONNECT_TIMEOUT = 60.0  # seconds
_GREETING_TIMEOUT = 5.0
# TCP keepalive: seconds idle, seconds between probes, number of probes.
_KEEP_ALIVE = (2, 1, 3)
#: Environment variable: threads for the CPU kernels of a process.
THREADS = "MLX_PAGED_NUM_THREADS"

#: Runs a function that blocks on other ranks; `Followers.wait` also notices when one ends.
Wait = Callable[[Callable[[], mx.distributed.Group]], mx.distributed.Group]


def launched_rank() -> int | None:
    """Returns the rank of this process under `mlx.launch`; None if started any other way."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdecimal() else None


def wait_here(connect: Callable[[], mx.distributed.Group]) -> mx.distributed.Group:
    """Returns the `Wait` of a rank whose process ends with rank 0."""
    return connect()


def join(
    environment: Mapping[str, str], backend: str, wait: Wait = wait_here
) -> mx.distributed.Group:
    """Connects this process to the other ranks. Waits until all have joined.

    Args:
        environment: Variables that tell MLX how to reach the others.
        backend: MLX's name of the back end, or "any".
    """

    def connect() -> mx.distributed.Group:
        group = ext.join_group(backend)
        # So far, a ring has connected this rank only to its neighbors.
        mx.eval(mx.distributed.all_sum(mx.ones((group.size(),)), group=group))
        return group

    with kept_environment(environment):
        os.environ.update(environment)
        return wait(connect)


def split(
    group: mx.distributed.Group, color: int, hosts: Sequence[str], wait: Wait = wait_here
) -> mx.distributed.Group:
    """Connects this process to the ranks of the same color. Every rank must call it.

    Args:
        hosts: The addresses of all ranks in MLX's ring; empty if another back end connects them.

    Raises:
        InvalidParameterError: That back end cannot split a group.
    """
    if not hosts:
        try:
            return group.split(color)
        except RuntimeError as error:  # "[jaccl] Group split not supported."
            expected = f"1 with tensor_parallel_size above 1, because MLX reports: {error}"
            raise InvalidParameterError("pipeline_parallel_size", expected, "more") from error
    [port] = free_ports(1, hosts[group.rank()])
    shown = np.zeros((group.size(), 2), dtype=np.int32)
    shown[group.rank()] = color, port
    shown = np.array(mx.distributed.all_sum(mx.array(shown), group=group))
    members = [rank for rank, (theirs, _) in enumerate(shown.tolist()) if theirs == color]
    path = _host_file([(hosts[rank], int(shown[rank, 1])) for rank in members])
    own = {"MLX_HOSTFILE": str(path), "MLX_RANK": str(members.index(group.rank()))}
    try:
        return join(own, "ring", wait)
    finally:
        private_folder.remove(path.parent)


def ring_hosts(size: int, backend: str) -> list[str]:
    """Returns the address of each rank in MLX's ring; empty if another back end connects them."""
    if launched_rank() is None:
        return [_LOOPBACK] * size if backend == "ring" else []
    return _hosts_of(os.environ["MLX_HOSTFILE"]) if "MLX_HOSTFILE" in os.environ else []


# --- Processes on this machine --------------------------------------------------------------------


def start(size: int, option: str) -> tuple[list[Follower], dict[str, str], str]:
    """Starts the other ranks on this machine.

    Args:
        size: Number of ranks, including this one.
        option: Name of the option that asked for them, for errors.

    Returns:
        The other ranks, and the environment and back end with which rank 0 must `join` them.

    Raises:
        InvalidParameterError: There are fewer NVIDIA GPUs than ranks.
    """
    platform = Platform.current()
    common, backend = {}, "ring"
    hosts: Path | None = None
    if platform.has_cuda:
        backend, devices = "nccl", visible_gpus()
        if len(devices) < size:
            expected = f"at most {len(devices)}, the number of visible GPUs"
            raise InvalidParameterError(option, expected, size)
        [port] = free_ports(1)
        common = {"NCCL_HOST_IP": _LOOPBACK, "NCCL_PORT": str(port), "MLX_WORLD_SIZE": str(size)}
    else:
        hosts = _host_file([(_LOOPBACK, port) for port in free_ports(size)])
        common = {"MLX_HOSTFILE": str(hosts)}
    if platform.on_cpu and THREADS not in os.environ:
        # No effect on this process if it has already run kernels.
        os.environ[THREADS] = threads_of(size)
    followers: list[Follower] = []
    try:
        for rank in range(1, size):
            own = {**common, "MLX_RANK": str(rank)}
            if platform.has_cuda:
                own["CUDA_VISIBLE_DEVICES"] = devices[rank]
            followers.append(_start_one(rank, own, backend))
    except BaseException:
        _end(followers)
        remove_host_file(common)
        raise
    return followers, {**common, "MLX_RANK": "0"}, backend


def _end(followers: Sequence[Follower]) -> None:
    """Ends processes that have not joined."""
    for follower in followers:
        follower.channel.close()
        follower.life.close()
        if follower.process is not None:
            follower.process.kill()
            follower.process.wait()


def _start_one(rank: int, environment: Mapping[str, str], backend: str) -> Follower:
    channel, theirs = socket.socketpair()
    life, their_life = socket.socketpair()
    with theirs, their_life:
        numbers = [str(s.fileno()) for s in (theirs, their_life)]
        process = subprocess.Popen(
            [sys.executable, "-m", _PROCESS, *numbers, backend],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **environment,
            },
            pass_fds=(theirs.fileno(), their_life.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=2,  # Only rank 0 may write results to stdout.
            process_group=0,  # Ctrl-C is for rank 0, which may let requests finish.
        )
    return Follower(rank, Channel(channel), life, process)


def threads_of(num_processes: int) -> str:
    """Returns the value of `THREADS` for each of several processes that share the cores."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return str(max(1, cores // num_processes))


def visible_gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(i) for i in range(mx.device_count(mx.gpu))]


def _host_file(addresses: Sequence[tuple[str, int]]) -> Path:
    """Writes a ring's host file: (host, port) per rank. The caller removes it."""
    path = private_folder.make() / "hosts.json"
    path.write_text(json.dumps([[f"{host}:{port}"] for host, port in addresses]))
    return path


def remove_host_file(environment: Mapping[str, str]) -> None:
    """Removes the file of `start`, once all ranks have joined."""
    if "MLX_HOSTFILE" in environment:
        private_folder.remove(Path(environment["MLX_HOSTFILE"]).parent)


def free_ports(count: int, host: str = _LOOPBACK) -> list[int]:
    """Returns ports that are free right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


# --- Processes that `mlx.launch` started ----------------------------------------------------------


def accept(group: mx.distributed.Group) -> list[Follower]:
    """On rank 0: accepts the connections of the other ranks.

    Raises:
        EngineDeadError: A rank did not connect in time.
    """
    size, secret = group.size(), secrets.token_bytes(_SECRET_BYTES)
    address = _address_of_rank_0(os.environ)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: dict[tuple[int, int], socket.socket] = {}
    with socket.create_server((address, 0), family=family, backlog=2 * size) as server:
        _shared(group, struct.pack("<H", server.getsockname()[1]) + secret)
        deadline = time.monotonic() + _CONNECT_TIMEOUT
        while len(found) < 2 * (size - 1):
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - {rank for rank, _ in found})
                raise EngineDeadError(f"ranks {missing} of {size} did not connect") from None
            key = greeted(sock, secret, size)
            if key is None or key in found:
                sock.close()  # Not one of our ranks.
            else:
                found[key] = sock
    return [
        Follower(rank, Channel(found[rank, _CHANNEL]), found[rank, _LIFE])
        for rank in range(1, size)
    ]


def connect(group: mx.distributed.Group) -> tuple[Channel, socket.socket]:
    """On any other rank: connects to rank 0; returns the channel and the life socket (`life`)."""
    told = _shared(group, bytes(2 + _SECRET_BYTES))
    [port], secret = struct.unpack("<H", told[:2]), told[2:]
    address = _address_of_rank_0(os.environ)
    sockets = []
    for which in (_CHANNEL, _LIFE):
        sock = socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT)
        sock.sendall(_GREETING.pack(secret, group.rank(), which))
        sock.settimeout(None)
        _keep_alive(sock)
        sockets.append(sock)
    return Channel(sockets[0]), sockets[1]


def _shared(group: mx.distributed.Group, data: bytes) -> bytes:
    """Broadcasts rank 0's bytes; the other ranks pass as many zeros."""
    own = mx.array(np.frombuffer(data, dtype=np.uint8).astype(np.int32))
    return np.array(mx.distributed.all_sum(own, group=group)).astype(np.uint8).tobytes()


def _address_of_rank_0(environment: Mapping[str, str]) -> str:
    """Returns the address at which MLX's back end reaches rank 0."""
    if "MLX_HOSTFILE" in environment:
        return _hosts_of(environment["MLX_HOSTFILE"])[0]
    coordinator = environment.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
    return environment.get("NCCL_HOST_IP") or coordinator or _LOOPBACK


def _hosts_of(path: str) -> list[str]:
    """Reads each rank's first address from a host file, without the port."""
    addresses = [str(each[0]) for each in json.loads(Path(path).read_text())]
    return [address.rpartition(":")[0].strip("[]") for address in addresses]


def greeted(sock: socket.socket, secret: bytes, size: int) -> tuple[int, int] | None:
    """Reads a greeting; returns (rank, `_CHANNEL` or `_LIFE`), or None if the secret is wrong."""
    sock.settimeout(_GREETING_TIMEOUT)
    data = b""
    try:
        while len(data) < _GREETING.size:
            got = sock.recv(_GREETING.size - len(data))
            if not got:
                return None
            data += got
    except OSError:
        return None
    given, rank, which = _GREETING.unpack(data)
    if not hmac.compare_digest(given, secret) or not 0 < rank < size or which > _LIFE:
        return None
    sock.settimeout(None)
    _keep_alive(sock)
    return rank, which


def _keep_alive(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in zip((idle, "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEP_ALIVE):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
