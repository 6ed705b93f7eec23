"""Two engines in one process: one computes prompts, the other one answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.engine.roles.stats import TransferStats
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

SECRET = b"not so secret, but long"
OPTIONS: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 200}


@dataclass
class Pair:
    """A decode engine, and the prefill engine that it asks."""

    decode: Engine
    prefill: Engine

    def step(self) -> None:
        """One step of both, as their threads would do."""
        self.step_prefill()
        _step(self.decode)

    def step_prefill(self) -> None:
        """One step of the prefill engine."""
        _step(self.prefill)

    def run(self, after_step: Callable[[], object] = lambda: None) -> None:
        """Steps until the decode engine has answered all requests."""
        while self.decode.has_unfinished:
            self.step()
            after_step()
        self.decode.check_integrity()

    def answer(self, prompt: list[int], params: SamplingParams, name: str = "one") -> RequestOutput:
        """The decode engine's answer to a prompt."""
        output = self.decode.add_request(name, prompt, params)
        self.run()
        return output


def _step(engine: Engine) -> None:
    if engine.has_unfinished:
        engine.step()
    else:
        engine.on_idle()


def transfers_of(engine: Engine) -> TransferStats:
    """What an engine has sent or received."""
    offloading = engine.stats().offloading
    assert offloading is not None and offloading.transfers is not None
    return offloading.transfers


def engine_with_role(
    role: str, model: LoadedModel, address: str, folder: Path, **options: Any
) -> Engine:
    """An engine that listens, or asks, at an address."""
    secret = folder / "secret"
    if not secret.exists():
        secret.write_bytes(SECRET + b"\n")
    given = {"prefill_min_tokens": 16, "prefill_secret_file": secret, **OPTIONS, **options}
    return Engine(model, EngineConfig(role=role, prefill_address=address, **given))


def port_of(engine: Engine) -> int:
    """The port that a prefill engine listens on."""
    assert engine._prefilling is not None
    return engine._prefilling.server.port


@contextmanager
def pair_of(
    prefill: LoadedModel,
    decode: LoadedModel,
    folder: Path,
    *,
    prefill_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Pair]:
    """Two engines with the same model; `options` are both's."""
    first = engine_with_role(
        "prefill", prefill, "127.0.0.1:0", folder, **options, **(prefill_options or {})
    )
    address = f"127.0.0.1:{port_of(first)}"
    try:
        yield Pair(engine_with_role("decode", decode, address, folder, **options), first)
    finally:
        assert first._prefilling is not None
        first._prefilling.server.close()
