"""A Gemma 4 model and an assistant with random weights, saved by transformers, and their reference
in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.models import VOCAB_SIZE, embedded
from support.oracle_torch import oracle_torch
from support.reference_configs import BASE, HEAD, REFERENCES, WINDOW
from support.reference_models import randomized, save


class AssistantReference:
    """Both in float64.

    Args:
        path: Where the model and ``assistant`` are written.
        is_ordered: The assistant scores the tokens of some groups only.
    """

    def __init__(self, path: Path, *, is_ordered: bool = False) -> None:
        import transformers

        torch = oracle_torch()
        self._model = save(REFERENCES["gemma4_text"], path / "model").double()
        embedded().tokenizer.save_pretrained(path / "model")
        text = {
            **BASE,
            **HEAD,
            "hidden_size": 32,
            "intermediate_size": 48,
            "global_head_dim": 32,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        }
        config = transformers.Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=BASE["hidden_size"],
            use_ordered_embeddings=is_ordered,
            num_centroids=VOCAB_SIZE // 8,
            centroid_intermediate_top_k=5,
        )
        config._attn_implementation = "eager"
        assistant = randomized(transformers.Gemma4AssistantForCausalLM(config), seed=3)
        if is_ordered:
            order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
            assistant.masked_embedding.token_ordering.copy_(order)
        assistant.eval().save_pretrained(path / "assistant")
        self._assistant = assistant.double()

    def drafts(
        self, tokens: Sequence[int], choose: Callable[[np.ndarray, int], int], count: int
    ) -> list[int]:
        """What the assistant drafts after known tokens.

        Args:
            choose: From logits and a position to a token.
        """
        torch = oracle_torch()
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([list(tokens[:-1])]),
                use_cache=False,
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
            states, found = output.hidden_states[-1][:, -1:], list(tokens[-1:])
            # A window counts the newest token, which has no key yet.
            shared = {
                kind: tuple(each[:, :, 1 - WINDOW :] for each in pair)
                if "sliding" in kind
                else pair
                for kind, pair in output.shared_kv_states.items()
            }
            for number in range(count):
                embeds = self._model.get_input_embeddings()(torch.tensor([found[-1:]]))
                made: Any = self._assistant(
                    inputs_embeds=torch.cat([embeds, states], dim=-1),
                    position_ids=torch.tensor([[len(tokens) - 1]]),
                    shared_kv_states=shared,
                    use_cache=False,
                )
                logits = made.logits[0, 0].numpy()
                if self._assistant.masked_embedding is not None:
                    logits = np.where(logits > logits.min(), logits, -np.inf)
                found.append(choose(logits, len(tokens) + number))
                states = made.last_hidden_state
        return found[1:]
