"""ModelSpec: the configuration of one model behind the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_paged.errors import InvalidParameterError

#: Estimated bytes of a process besides weights and KV cache, used until it is measured.
PROCESS_BYTES = 400 << 20
#: Names that mean the first model.
DEFAULT_NAMES = frozenset({"default"})


@dataclass(frozen=True)
class ModelSpec:
    """The configuration of one model.

    Attributes:
        name: The name in answers.
        path: Directory, GGUF file or hub id; None: the embedded model.
        aliases: Other names that requests may use.
        kv_bytes: Bytes of the KV cache of one replica, on all its ranks.
        num_processes: Processes of one replica: its ranks, and the server if that is separate.
        pinned: Never unload it to make room or for idleness.
        preload: Load it when the server starts.
        ttl: Seconds without requests after which it is unloaded; None: no limit.
        adapters: Names of the adapters in its options.
        max_num_seqs: Maximum sequences that it runs at once.
        launch: Options for its process, as opaque bytes that `ModelProcess` passes on.
        environments: Environment variables of each process; more than one means replicas.
        has_own_devices: True if each replica has its own device and memory.
    """

    name: str
    path: str | None
    aliases: tuple[str, ...] = ()
    kv_bytes: int = 0
    num_processes: int = 1
    pinned: bool = False
    preload: bool = False
    ttl: float | None = None
    adapters: tuple[str, ...] = ()
    max_num_seqs: int = 256
    launch: bytes = b""
    environments: tuple[Mapping[str, str], ...] = ({},)
    has_own_devices: bool = False

    @property
    def num_replicas(self) -> int:
        """Number of processes that serve it."""
        return len(self.environments)

    @property
    def num_copies(self) -> int:
        """Number of processes that share one device's memory."""
        return 1 if self.has_own_devices else self.num_replicas

    @property
    def can_use_spare(self) -> bool:
        """True if a process can take it that was started before its model was known.

        Replicas have their own environment. An engine or ranks in processes of their own would
        import everything there again.
        """
        return self.num_replicas == 1 and self.num_processes == 1 and not self.environments[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model itself."""
        return (self.name, *self.aliases, *(() if self.path is None else (self.path,)))


def check_names(specs: tuple[ModelSpec, ...]) -> None:
    """Refuses a name that refers to two models.

    Raises:
        InvalidParameterError: A name is reserved, or already belongs to another model.
    """
    owners: dict[str, ModelSpec] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases, *spec.adapters):
            if name in DEFAULT_NAMES:
                raise InvalidParameterError("model", "a name other than 'default'", name)
            if owners.setdefault(name, spec) is not spec:
                raise InvalidParameterError("model", "a name that no other model has", name)
