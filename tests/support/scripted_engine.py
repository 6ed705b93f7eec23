"""An engine with scripted answers: a real one whose tokens are all forced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_paged.engine.async_engine import AsyncEngine, RequestStream
from mlx_paged.engine.client import EngineRequest
from mlx_paged.engine.sampling_params import SamplingParams


class ScriptedEngine(AsyncEngine):
    """Its answers are `script`'s texts, token by token; n answers to a prompt are all the same.

    Attributes:
        script: The next answers; if it is empty, the model is free.
        prompts: Prompts of the requests, as text.
        params: Parameters of the requests.
    """

    script: list[str]
    prompts: list[str]
    params: list[SamplingParams]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.script, self.prompts, self.params = [], [], []

    def says(self, *texts: str) -> None:
        """Sets the next answers."""
        self.script += texts

    async def submit(self, request: EngineRequest) -> RequestStream:
        await self.ready()
        tokenizer, prompt, params = self.tokenizer, request.prompt, request.params
        assert isinstance(params, SamplingParams) and not isinstance(prompt, str | Mapping)
        self.prompts.append(tokenizer.decode(list(prompt)))
        self.params.append(params)
        if self.script:
            tokens = tokenizer.encode(self.script.pop(0), add_special_tokens=False)
            tokens.append(min(tokenizer.eos_token_ids))
            request = dataclasses.replace(
                request,
                # A forced answer ignores the grammar.
                params=dataclasses.replace(params, structured_outputs=None),
                token_mask=_forces(tokens, self.info.vocab_size),
            )
        return await super().submit(request)


def _forces(tokens: list[int], vocab_size: int) -> Any:
    def mask(_: int, generated: Sequence[int]) -> np.ndarray:
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[tokens[min(len(generated), len(tokens) - 1)]] = True
        return allowed

    return mask
