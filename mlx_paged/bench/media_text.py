"""Measures how much media requests slow down text-only requests.

Two questions: is a multimodal model slower on texts than its text-only twin, and how much do
media requests slow down the texts that run beside them?
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_paged import extension  # noqa: F401  (its BLAS has to come before mlx.core)

# isort: split
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from mlx_paged.engine.llm import LLM
from mlx_paged.engine.media import MediaPrompts, PreparedMedia, TextWithMedia
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

if TYPE_CHECKING:
    from mlx_paged.bench.media_engines import Ask

_PROMPT_TOKENS = 64
# mlx-lm's family with the same language layers, by mlx-vlm family.
_TWINS = {"idefics3": "llama", "smolvlm": "llama", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}


def text_twin(model: LoadedModel) -> LoadedModel | None:
    """mlx-lm's model with the same language layers and the same (shared) weights; None if no such
    model is known."""
    kind = _TWINS.get(model.model_type)
    if kind is None:
        return None
    text = dict(model.config.get("text_config") or model.config)
    text = {k: v for k, v in text.items() if k != "vision_config" and "quantization" not in k}
    text["model_type"] = kind
    if kind == "qwen2":  # For text alone, the three positions are equal.
        text.pop("rope_scaling", None)
    text.setdefault("tie_word_embeddings", False)
    model_class, args_class = _get_classes(config=text)
    twin = model_class(args_class.from_dict(text))
    weights = {}
    for name, array in tree_flatten(model.model.language_model.parameters()):
        is_inner = name.startswith(("model.", "lm_head."))
        weights[name if is_inner else f"model.{name}"] = array
    names = {name for name, _ in tree_flatten(twin.parameters())}
    if names != weights.keys():  # One of them has biases, for example.
        return None
    twin.update(tree_unflatten(list(weights.items())))
    twin.eval()
    return replace(model, model=twin, config=text, name=f"{model.name}, text", media=None)


def text_speed(
    llm: LLM, model: LoadedModel, rounds: int, rows: int, max_tokens: int
) -> dict[str, Any]:
    """Decode tokens per second of texts, on the multimodal model and on its text twin in turns.

    Returns:
        ``with_media`` and ``text_model`` (medians), their ``ratio`` (median over turns) and
        ``ratios``; ``text_model`` is None if no text model has the same layers.
    """
    engines = {"with_media": llm}
    twin = text_twin(model)
    if twin is not None:
        config = llm.engine.config
        engines["text_model"] = LLM(
            twin,
            max_num_seqs=config.max_num_seqs,
            num_gpu_blocks_override=config.num_gpu_blocks_override,
        )
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name in list(engines) if turn % 2 == 0 else list(engines)[::-1]:
            times = _decode(engines[name], _texts(llm, rows, turn), max_tokens)
            if turn:  # The first one is a warm-up.
                found[name].append(_rate(times))
    ratios = [a / b for a, b in zip(found["with_media"], found.get("text_model", []))]
    return {
        "rows": rows,
        "with_media": statistics.median(found["with_media"]),
        "text_model": statistics.median(found["text_model"]) if twin is not None else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
    }


def beside(
    llm: LLM, asks: Sequence[Ask], num_tokens: int, rounds: int, rows: int, max_tokens: int
) -> dict[str, Any]:
    """Measures in turns how much two concurrent requests slow down decoding texts.

    The two are texts of `num_tokens` tokens, or requests with one new image each and as many
    tokens. They start when a quarter and a half of the texts' tokens are generated.

    Args:
        asks: Requests with new images: two per round, and two more.

    Returns:
        For ``alone``, ``beside_texts``, ``beside_pictures`` (new ones), and
        ``beside_known_pictures``: ``tokens_per_second`` of the texts, and the largest gap between
        two of their tokens in ms; ``ratio``: speed beside new images over speed beside texts;
        ``ratio_known``: the same for known images.
    """
    kinds = ("alone", "beside_texts", "beside_pictures", "beside_known_pictures")
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        pictures = asks[2 * turn : 2 * turn + 2]
        for kind in kinds:
            llm.engine.reset_prefix_cache()  # Encoder outputs are in their own cache.
            others: list[list[int] | PreparedMedia] = []
            if kind == "beside_texts":
                others = [*_texts(llm, 2, 1000 + turn, num_tokens)]
            elif kind != "alone":
                others = _prepared(llm, pictures)
            texts = _texts(llm, rows, turn)
            times = _decode(llm, texts, max_tokens, others, own_tokens=max_tokens // 8)
            if turn:
                speeds[kind].append(_rate(times))
                steps = np.unique(np.concatenate(times))
                gaps[kind].append(float(np.diff(steps).max()) * 1e3)
    of_texts = speeds["beside_texts"]
    return {
        "rows": rows,
        "tokens_of_each": num_tokens,
        **{
            kind: {
                "tokens_per_second": statistics.median(speeds[kind]),
                "largest_gap_ms": statistics.median(gaps[kind]),
            }
            for kind in kinds
        },
        "ratio": statistics.median(a / b for a, b in zip(speeds["beside_pictures"], of_texts)),
        "ratio_known": statistics.median(
            a / b for a, b in zip(speeds["beside_known_pictures"], of_texts)
        ),
    }


def _texts(llm: LLM, count: int, seed: int, length: int = _PROMPT_TOKENS) -> list[list[int]]:
    rng = np.random.default_rng((seed, count, length))
    # Ids of the first letters: every tokenizer has these, and none is a placeholder.
    most = min(256, llm.engine.vocab_size)
    return rng.integers(16, most, (count, length)).tolist()  # type: ignore[no-any-return]


def _decode(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    max_tokens: int,
    others: Sequence[list[int] | PreparedMedia] = (),
    *,
    own_tokens: int = 1,
) -> list[list[float]]:
    """Arrival times of each text's tokens; `others` start while they decode."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    few = replace(params, max_tokens=max(1, own_tokens))
    times: list[list[float]] = [[] for _ in texts]
    marks = [max_tokens * (i + 1) // (2 * len(others)) for i in range(len(others))]
    asked = 0
    for i, text in enumerate(texts):
        engine.add_request(f"text {i}", list(text), params)
    while engine.has_unfinished:
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            if update.error is not None:
                raise update.error
            if update.request_id.startswith("text"):
                times[int(update.request_id.split()[1])] += [now] * len(update.token_ids)
        if asked < len(others) and len(times[-1]) >= marks[asked]:
            other = others[asked]
            name, asked = f"other {asked}", asked + 1
            if isinstance(other, PreparedMedia):
                engine.add_request(name, other.prompt.token_ids, few, media=other)
            else:
                engine.add_request(name, other, few)
    engine.synchronize()
    return times


def _prepared(llm: LLM, asks: Sequence[Ask]) -> list[list[int] | PreparedMedia]:
    """Prepares requests whose images are already read and processed, as on a server's threads."""
    found: list[list[int] | PreparedMedia] = []
    engine = llm.engine
    media = MediaPrompts(engine.media, engine.config.media_options, engine.media_reason)
    try:
        for prompt in llm.chat_prompts([ask.messages() for ask in asks]):
            assert isinstance(prompt, TextWithMedia)
            found.append(media.prepare(*prompt, "prompt"))
    finally:
        media.close()
    return found


def _rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all texts, from the moment when all of them decode."""
    start = max(each[0] for each in times)
    moments = [at for each in times for at in each if at > start]
    return len(moments) / (max(moments) - start)
