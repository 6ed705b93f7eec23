"""What mlx-lm's server lacks: an answer to an empty prompt.

Its generation thread dies of one, and with it the server. An exact hit in its prompt cache, the
other input that it dies of, is answered by the seams that take prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def tokenize(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `mlx_lm.server.ResponseGenerator._tokenize`.

    A text without a token begins where every text begins: with the model's first token.
    """

    @wraps(original)
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        prompt, segments, types, state, vision = original(self, tokenizer, request, args)
        if not prompt:
            first = tokenizer.bos_token_id
            if first is None:
                first = tokenizer.eos_token_id  # as models without one are trained
            if first is None:
                # The server tells its client what an exception here says.
                raise ValueError("the prompt is empty, and this model has no token to begin with")
            prompt, segments, types = [first], [[first]], ["assistant"]
        return prompt, segments, types, state, vision

    return _tokenize
