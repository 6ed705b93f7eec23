"""What holds where a request is silent: the model's `generation_config.json`, and the server's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.config_files import GENERATION_CONFIG, read_generation_config

#: What is taken of a generation config, as vLLM does; `max_new_tokens` is a limit for everybody.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OVERRIDES = (*SAMPLING, "max_new_tokens")


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of requests.

    Attributes:
        sampling: Fields of `SamplingParams` where a request has none.
        max_new_tokens: Most tokens of any answer; None: no limit but the context.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Those of a generation config; of its other entries none is about a request.

        Raises:
            InvalidParameterError: a value that cannot be honoured.
        """
        sampling = {name: config[name] for name in SAMPLING if config.get(name) is not None}
        limit = config.get("max_new_tokens")
        try:
            SamplingParams(**sampling, max_tokens=limit)
        except InvalidParameterError as error:
            name = "max_new_tokens" if error.field == "max_tokens" else error.field
            raise InvalidParameterError(
                f"{name} of the generation config", error.expected, error.actual
            ) from error
        return cls(sampling, limit)

    def limit(self, max_tokens: int | None) -> int | None:
        """What becomes of the tokens that a request asks for."""
        asked = [n for n in (max_tokens, self.max_new_tokens) if n is not None]
        return min(asked, default=None)


def generation_config_of(source: str) -> dict[str, Any] | None:
    """What ``--generation-config`` names.

    Args:
        source: "auto": the model's own; "vllm": none; else a directory that has one.

    Returns:
        None for the model's own.

    Raises:
        InvalidParameterError: there is no such file, or it cannot be read.
    """
    if source == "auto":
        return None
    if source == "vllm":
        return {}
    directory = Path(source)
    if not (directory / GENERATION_CONFIG).is_file():
        expected = f"'auto', 'vllm' or a directory that has a {GENERATION_CONFIG}"
        raise InvalidParameterError("generation_config", expected, source)
    return read_generation_config(directory)


def overrides_of(given: str) -> dict[str, Any]:
    """What ``--override-generation-config`` holds.

    Raises:
        InvalidParameterError: it is no JSON object, or has an entry that would mean nothing.
    """
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    name = "override_generation_config"
    if not isinstance(found, dict):
        raise InvalidParameterError(name, "a JSON object", given)
    unknown = sorted(found.keys() - set(OVERRIDES))
    if unknown:
        raise InvalidParameterError(name, f"of {', '.join(OVERRIDES)}", unknown[0])
    GenerationDefaults.of(found)
    return found
