"""Multimodal transformers models with random weights, saved by transformers, and their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.more_reference_vision import ALL_REFERENCES
from support.oracle_torch import oracle_torch

_TYPES = {"image": 1, "video": 2, "audio": 3}
# Values of parameters that a model initializes so that they have no effect.
_BUFFERS = {
    "input_min": -1.5,
    "input_max": 1.2,
    "output_min": -1.0,
    "output_max": 1.3,
    "std_bias": 0.2,
    "std_scale": 0.8,
}


def save(name: str, path: Path, *, seed: int = 3) -> Any:
    """Writes a checkpoint with transformers' own code; returns its model."""
    from support.media_checkpoints import checkpoint as checkpoint_of
    from support.media_checkpoints import write_tokenizer
    from support.more_media_checkpoints import ALL_CHECKPOINTS

    reference, torch = ALL_REFERENCES[name], oracle_torch()
    path.mkdir(parents=True, exist_ok=True)
    makes = {**ALL_CHECKPOINTS, "deepseek_vl": partial(checkpoint_of, "deepseek_vl")}
    checkpoint = makes[reference.checkpoint]()
    ids = write_tokenizer(path, checkpoint)
    torch.manual_seed(seed)
    model = reference.made()(reference.config(ids)).float().eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.5 if "embed" in parameter_name else 0.12)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            field = buffer_name.rpartition(".")[2]
            if field in _BUFFERS:
                buffer.copy_(torch.full_like(buffer, _BUFFERS[field]))
    model.set_attn_implementation("eager")
    model.save_pretrained(path)
    files = {"preprocessor_config.json": checkpoint.processor, **checkpoint.more}
    for file, content in files.items():
        (path / file).write_text(json.dumps(content))
    return model


def log_probabilities(
    name: str, model: Any, media: Any, parts: Sequence[Any], token_ids: list[int], count: int
) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of transformers' model for a prompt, and their distributions.

    Args:
        media: The `MediaModel` whose processor made the prompt.
        parts: Parts of a message: texts, images, (frames, fps) pairs, and (samples, rate) pairs.
        token_ids: Tokens of the prompt.
        count: Number of tokens to generate.

    Returns:
        The tokens, and ``[count, vocab_size]`` log-probabilities.
    """
    reference, torch = ALL_REFERENCES[name], oracle_torch()
    kinds = [kind_of(part) for part in parts]
    content = [
        {"type": "text", "text": part} if kind == "text" else {"type": kind}
        for part, kind in zip(parts, kinds)
    ]
    prompt = media.process(
        [{"role": "user", "content": content}],
        images=[part for part, kind in zip(parts, kinds) if kind == "image"],
        videos=[
            SimpleNamespace(frames=part[0], fps=part[1]["fps"])
            for part, kind in zip(parts, kinds)
            if kind == "video"
        ],
        audios=[
            SimpleNamespace(samples=part[0], rate=part[1])
            for part, kind in zip(parts, kinds)
            if kind == "audio"
        ],
    )
    found: dict[str, list[np.ndarray]] = {}
    for item in prompt.inputs:
        for key, value in item.arrays.items():
            is_list = isinstance(value, (list, tuple))
            found.setdefault(key, []).append(value if is_list else np.array(value))
    if found and reference.joins is not None:
        joined = reference.joins(found)
    else:
        joined = {key: np.concatenate(each) for key, each in found.items() if np.ndim(each[0])}
    tokens = torch.tensor([token_ids])
    arguments: dict[str, Any] = {}
    for key, array in joined.items():
        value = torch.tensor(array)
        arguments[key] = value.float() if value.is_floating_point() else value
    if reference.token_types is not None:
        types = torch.zeros_like(tokens)
        for span in prompt.spans:
            types[0, torch.tensor(np.asarray(span.rows), dtype=torch.long)] = _TYPES[span.kind]
        if arguments:
            arguments[reference.token_types] = types
    with torch.no_grad():
        output = reference.generates(model).generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **arguments,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    logits = torch.stack([each[0] for each in output.logits]).double() * reference.logit_scale
    return output.sequences[0, len(token_ids) :].tolist(), torch.log_softmax(logits, -1).numpy()


def kind_of(part: Any) -> str:
    """The text of a part of a message."""
    if isinstance(part, str):
        return "text"
    if isinstance(part, tuple):
        return "audio" if isinstance(part[1], int) else "video"
    return "image"
