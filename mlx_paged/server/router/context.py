"""RouterContext: the state that all requests of a router share."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from mlx_paged.server.config import MAX_MEDIA_BODY_SIZE
from mlx_paged.server.context import Phase, ServerContext
from mlx_paged.server.router.ledger import Ledger
from mlx_paged.server.router.pool import ModelPool


@dataclass
class RouterContext(ServerContext):
    """The state that all requests of a router share.

    Attributes:
        pool: The models.
        ledger: Charges clients for the tokens that the models' processes report.
        is_preloading: True until the models to preload are loaded, or failed.
    """

    pool: ModelPool = field(kw_only=True)
    ledger: Ledger = field(default_factory=Ledger)
    is_preloading: bool = False

    @property
    def phase(self) -> Phase:
        """See `ServerContext`. Ready at once, because requests wait for their model."""
        return Phase.DRAINING if self.draining else Phase.READY

    @property
    def max_body_size(self) -> int:
        """See `ServerContext`; the model's process may allow less."""
        return self.config.max_body_size or MAX_MEDIA_BODY_SIZE

    @property
    def max_model_len(self) -> int | None:
        """See `ServerContext`; the model's process checks it."""
        return None

    def served_name(self, name: str) -> str:
        """See `ServerContext`."""
        return self.pool.find(name).name

    def check_runner(self, runner: str, path: str) -> None:
        """See `ServerContext`; the model's process checks it."""

    def drain(self) -> None:
        """See `ServerContext`."""
        super().drain()
        self.pool.drain()


def router_of(request: Request) -> RouterContext:
    """Returns the state that all requests of a router share."""
    context: RouterContext = request.app.state.context
    return context
