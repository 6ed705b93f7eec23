"""Small transformers models with random weights, saved by transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.metal_stand_ins import standing_in
from support.models import embedded
from support.oracle_torch import oracle_torch
from support.parity import Driver, relative_rms
from support.reference_configs import BASE, Reference

# isort: split
import numpy as np

from mlx_paged.engine.loading import load
from mlx_paged.model.wrap import build_paged_model

#: Rows per step: prefills and decodes, longer than the windows and the unscaled contexts.
CHUNKS = (40, 10, 1, 1, 8)
#: RMS of the logits' difference over that of the logits, float32.
TOLERANCE = 1e-4
_TOWERS = re.compile("vision|visual|projector|audio|image")


def save(reference: Reference, path: Path, *, seed: int = 0, original: bool = True) -> Any:
    """Saves a small model with random weights by transformers' `save_pretrained`.

    Args:
        original: Use the published names and expert layout, transformers' default; False: those of
            its own modules.

    Returns:
        transformers' model, in float32.
    """
    import transformers

    torch = oracle_torch()

    fields = dict(reference.config) if reference.bare else {**BASE, **reference.config}
    fields.setdefault("eos_token_id", 2)
    if reference.text is not None:
        fields = {**reference.config, "text_config": {**BASE, **reference.text}}
    if reference.vision is not None:
        fields["vision_config"] = reference.vision
    config = transformers.CONFIG_MAPPING[reference.model_type](**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    if reference.architecture is None:
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = getattr(transformers, reference.architecture)(config)
    randomized(model, seed)
    weights = None
    if reference.vision is not None:
        weights = {n: w for n, w in model.state_dict().items() if not _TOWERS.search(n)}
    model.eval().save_pretrained(path, state_dict=weights, save_original_format=original)
    return model


def randomized(model: Any, seed: int) -> Any:
    """Gives a transformers model random weights, and returns it."""
    torch = oracle_torch()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in model.state_dict():
            weight = named.get(name)
            if weight is None or not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim < 2 or "norm" in name:
                weight.add_(0.1 * noise)
            elif bool((weight == weight.reshape(-1)[0]).all()):
                weight.add_(0.2 * noise)
            elif weight.std() > 0:
                weight.mul_(1.2 / (weight.std() * weight.shape[-1] ** 0.5))
            if "indexer.wk" in name:
                weight.mul_(0.01)  # small enough that the norm's epsilon matters
    return model


def differences(reference: Reference, path: Path, *, original: bool = True) -> list[float]:
    """Saves a model, loads it here, and compares logits after chunks and decodes of one prompt.

    Returns:
        RMS of the logits' difference over that of the logits, in float32.
    """
    model = save(reference, path, original=original)
    embedded().tokenizer.save_pretrained(path)
    tokens = np.random.default_rng(0).integers(3, 90, sum(CHUNKS)).tolist()
    expected = reference_logits(model, tokens)
    with standing_in(reference.model_type):
        loaded = load(path, dtype="float32")
        driver = Driver(build_paged_model(loaded.model, loaded.config, block_size=8))
        return differences_by_chunk(driver, tokens, expected)


def differences_by_chunk(driver: Driver, tokens: list[int], expected: np.ndarray) -> list[float]:
    """Runs one prompt in chunks and decodes, and compares the logits after each.

    Args:
        expected: ``[len(tokens), vocab_size]`` logits.

    Returns:
        RMS error of the logits of each step, relative to the RMS of the expected ones.
    """
    done, found = 0, []
    for count in CHUNKS:
        got = driver.step({"one": tokens[done : done + count]})["one"]
        done += count
        found.append(relative_rms(got, expected[done - 1]))
    return found


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """``[len(tokens), vocab_size]`` by transformers, for the whole prompt at once."""
    torch = oracle_torch()
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return found[0].float().numpy()
