"""Small models for the tests, mlx-lm's dense answers for comparison, and a driver for single steps.

The tiny models have random weights, sharpened until attention decides the logits: with mlx-lm's
mild initial weights, all rows look alike and a wrong cache would hardly show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any
from unittest import mock

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

from mlx_paged.core import BlockCopy, StepBatch, StepTable
from mlx_paged.engine import runner as runner_module
from mlx_paged.engine.loading import load
from mlx_paged.engine.runner import LaunchedStep, ModelRunner
from mlx_paged.engine.sampling.sampler import Sampled, SamplingMetadata, SamplingRow
from mlx_paged.model.kv_formats import KVFormat
from mlx_paged.model.layout import Mode
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.wrap import convert_to_paged
from support.plain import plain_caches
from support.step_rows import IN_FLIGHT_TOKEN, Row, batch_of

VOCAB_SIZE = 96
GREEDY = SamplingRow(temperature=0, seed=0, position=0)


def scheduled(
    seq_id: int,
    name: str,
    token_ids: Sequence[int],
    start: int,
    blocks: Sequence[int],
    samples: bool = True,
    *,
    sampling: SamplingRow = GREEDY,
    input_from: int = -1,
) -> Row:
    """A sequence's part of a step that was built without a scheduler."""
    return Row(
        sequence=None,
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        start=start,
        samples=samples,
        input_from=input_from,
        tables=(StepTable(tuple(blocks), 0),),
        name=name,
        sampling=sampling,
    )


def step_of(
    rows: Sequence[Row], copies: tuple[tuple[BlockCopy, ...], ...] = ((),), *, step: int = 1
) -> StepBatch:
    """A batch of rows, with the settings of those that sample."""
    settings = [row.sampling._replace(position=row.context_len) for row in rows if row.samples]
    return batch_of(rows, copies, step=step, sampling=SamplingMetadata.of(settings))


def tiny_config(model_type: str, *, tied: bool = True, **fields: Any) -> dict[str, Any]:
    """A ``config.json`` for a model with a few thousand weights; `fields` override."""
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
        **fields,
    }


def tiny_model(config: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """mlx-lm's model for a config, with random float32 weights."""
    model_class, args_class = _get_classes(config=dict(config))
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(dict(config)))

    def sharpen(path: str, weight: mx.array) -> mx.array:
        if path.endswith("bias"):
            return mx.random.normal(weight.shape) * 0.2
        if "norm" in path:
            return 1 + mx.random.normal(weight.shape) * 0.1
        return weight * 3 if "_proj" in path else weight

    model.update(tree_map_with_path(sharpen, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def save_tiny(path: Path, config: Mapping[str, Any], model: nn.Module | None = None) -> None:
    """Writes a model directory with the embedded model's tokenizer."""
    from mlx_lm.utils import save_config, save_model

    path.mkdir(parents=True, exist_ok=True)
    save_model(path, model or tiny_model(config))
    save_config(dict(config), path / "config.json")
    embedded().tokenizer.save_pretrained(path)


@lru_cache(maxsize=1)
def embedded() -> LoadedModel:
    """The embedded model, loaded once and never passed to an engine."""
    return load(dtype="float32")


def embedded_twin() -> LoadedModel:
    """The embedded model for one engine: its own modules, with weights shared with `embedded`."""
    source = embedded()
    model_class, args_class = _get_classes(config=source.config)
    model = model_class(args_class.from_dict(source.config))
    model.load_weights(tree_flatten(source.model.parameters()))
    model.eval()
    return LoadedModel(model, source.tokenizer, source.config, source.name)


def dense_logits(model: nn.Module, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    """``[vocab_size]`` logits after the last token, with mlx-lm's own cache, chunk by chunk."""
    cache = plain_caches(model)
    for chunk in chunks:
        logits = model(mx.array([list(chunk)]), cache=cache)
        mx.eval(logits)
    return np.array(logits[0, -1].astype(mx.float32))


def dense_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The embedded model's answer with mlx-lm's own cache, past any end token."""
    return list(_dense_greedy(tuple(prompt), num_tokens))


@lru_cache(maxsize=256)
def _dense_greedy(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = embedded().model
    cache = plain_caches(model)
    tokens, answer = list(prompt), []
    for _ in range(num_tokens):
        tokens = [int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item())]
        answer += tokens
    return tuple(answer)


def rms(values: np.ndarray) -> float:
    """Root mean square; NaN if any element is NaN."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def poisoned(pool: mx.array) -> mx.array:
    """Fills an array with NaN; a quantized pool gets all ones, so its scales and e4m3 are NaN."""
    if mx.issubdtype(pool.dtype, mx.floating):
        return mx.full(pool.shape, mx.nan, pool.dtype)
    ones = mx.full((pool.nbytes,), 255, mx.uint8)
    return ones.view(pool.dtype).reshape(pool.shape)


@dataclass
class Rows:
    """A sequence of `StepDriver`: its blocks and the tokens in them."""

    seq_id: int
    chunks: list[list[int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


class StepDriver:
    """Drives a `ModelRunner` step by step, with an allocator that returns shuffled block ids.

    All pools are initially NaN, so reading an unwritten slot becomes visible.
    """

    def __init__(
        self,
        model: nn.Module,
        model_type: str,
        *,
        block_size: int,
        num_blocks: int = 64,
        seed: int = 0,
        kv_format: KVFormat | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.block_size = block_size
        modes = list(Mode) if mode is None else [mode]
        paged = convert_to_paged(model, model_type, modes=modes, block_size=block_size)
        if kv_format is not None:
            paged.layout = paged.layout.with_kv_format(kv_format)
        self.runner = ModelRunner(paged, num_blocks=num_blocks)
        self.caches = paged.attention_caches
        for cache in self.caches:
            cache.key_pool = poisoned(cache.key_pool)
            cache.value_pool = poisoned(cache.value_pool)
            mx.eval(cache.key_pool, cache.value_pool)
        self.sequences: dict[str, Rows] = {}
        self._free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).tolist()
        self._copies: list[BlockCopy] = []
        self._num_steps = 0

    def fork(self, name: str, source: str, num_tokens: int) -> None:
        """Starts a sequence with a prefix of another, as prefix sharing does.

        Full blocks are shared; a partial last block is copied at the start of the next step.
        """
        old, new = self.sequences[source], Rows(len(self.sequences))
        num_full, num_partial = divmod(num_tokens, self.block_size)
        assert num_tokens <= len(old.tokens)
        new.chunks = [old.tokens[:num_tokens]]
        new.blocks = old.blocks[:num_full]
        if num_partial:
            new.blocks.append(self._free.pop())
            self._copies.append(BlockCopy(old.blocks[num_full], new.blocks[-1]))
        self.sequences[name] = new

    def schedule(self, name: str, tokens: Sequence[int], *, samples: bool = True) -> Row:
        """The rows of one sequence, with blocks allocated; -1 stands for a token in flight."""
        seq = self.sequences.setdefault(name, Rows(len(self.sequences)))
        start = len(seq.tokens)
        seq.chunks.append(list(tokens))
        while len(seq.blocks) * self.block_size < start + len(tokens):
            seq.blocks.append(self._free.pop())
        return scheduled(seq.seq_id, name, tokens, start, seq.blocks, samples)

    def launch(
        self, *rows: Row, previous: LaunchedStep | None = None
    ) -> tuple[LaunchedStep, dict[str, np.ndarray]]:
        """Runs one step; returns it and the ``[vocab_size]`` logits of each row that samples."""
        self._num_steps += 1
        if previous is not None:
            sampled = list(compress(previous.batch.seq_ids, previous.batch.samples))
            rows = tuple(
                row._replace(input_from=sampled.index(row.seq_id))
                if row.token_ids == (IN_FLIGHT_TOKEN,)
                else row
                for row in rows
            )
        batch = step_of(rows, (tuple(self._copies),), step=self._num_steps)
        self._copies = []
        captured: list[mx.array] = []
        real_sample = runner_module.sample

        def capture(logits: mx.array, *args: Any, **options: Any) -> Sampled:
            captured.append(logits)
            return real_sample(logits, *args, **options)

        with mock.patch.object(runner_module, "sample", capture):
            launched = self.runner.launch(batch, previous)
        names = [row.request_id for row in rows if row.samples]
        if not names:
            assert not captured, "a step that samples nothing has no use for logits"
            mx.eval(launched.chosen.tokens)
            return launched, {}
        [logits] = captured
        is_padded = self.runner.model.platform.repeats_steps and logits.shape[0] > len(names)
        assert is_padded or logits.shape[0] == len(names), "logits only for the rows that sample"
        return launched, dict(zip(names, np.array(logits.astype(mx.float32))))

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Runs one step in which every sequence samples."""
        return self.launch(*(self.schedule(name, tokens) for name, tokens in work.items()))[1]

    def num_written_slots(self) -> list[tuple[int, int]]:
        """(key slots, value slots) of each layer that no longer hold the poison."""
        return [
            tuple(
                int((~np.isnan(np.array(pool))).all(axis=(2, 3)).sum())
                for pool in (cache.key_pool, cache.value_pool)
            )  # type: ignore[misc]
            for cache in self.caches
        ]


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Random tokens for the tiny models."""
    return rng.integers(0, VOCAB_SIZE, count).tolist()


__all__ = [
    "GREEDY",
    "IN_FLIGHT_TOKEN",
    "VOCAB_SIZE",
    "Rows",
    "StepDriver",
    "dense_greedy",
    "dense_logits",
    "embedded",
    "embedded_twin",
    "random_tokens",
    "rms",
    "save_tiny",
    "scheduled",
    "step_of",
    "tiny_config",
    "tiny_model",
]
