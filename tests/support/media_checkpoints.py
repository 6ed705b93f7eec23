"""Writes checkpoints of small multimodal models with their own tokenizers and processors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from mlx_paged.multimodal.files import read_config
from mlx_paged.multimodal.packages import package_of
from support.media_cases import package, vary
from support.media_checkpoint_table import TABLE, Fields, fields_of, with_ids

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}{{ MARKS[p['type']] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass
class Checkpoint:
    """The parameters of one family's checkpoint.

    Attributes:
        config: Makes the configuration from the ids of special tokens.
        special: Special tokens in addition to the chat template's.
        marks: Text that a template writes for an item of a kind.
        processor: ``preprocessor_config.json``.
        more: Other files.
        named: Attributes of the tokenizer.
    """

    config: Callable[[dict[str, int]], dict[str, Any]]
    special: list[str]
    marks: dict[str, str]
    processor: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


def write(path: Path, checkpoint: Checkpoint, *, seed: int = 0, weights: bool = True) -> Path:
    """Writes a checkpoint with random weights, or only a processor."""
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path, checkpoint)
    config = checkpoint.config(ids)
    for name, content in {
        "config.json": config,
        "preprocessor_config.json": checkpoint.processor,
        **checkpoint.more,
    }.items():
        (path / name).write_text(json.dumps(content))
    # transformers has defaults for missing fields.
    config = read_config(json.loads(json.dumps(config)))
    if not weights:
        return path
    m = package(package_of(config) or "")
    built = m.ModelConfig.from_dict(config)
    from mlx_vlm.utils import update_module_configs

    parts = ["text", "vision", "perceiver", "projector", "audio"]
    model = vary(m.Model(update_module_configs(built, m, config, parts)), seed)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    return path


def write_tokenizer(path: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Writes a tokenizer of bytes and special tokens; returns the latter's ids."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|im_start|>", "<|im_end|>", "<pad>", *checkpoint.special]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    marks = json.dumps(checkpoint.marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=TEMPLATE.replace("MARKS", marks),
        **checkpoint.named,
    )
    fast.save_pretrained(path)
    return {token: tokenizer.token_to_id(token) for token in special}


def checkpoint(name: str) -> Checkpoint:
    """A row of the table, which the caller may modify."""
    return made_of(fields_of(name))


def made_of(fields: Fields) -> Checkpoint:
    """The checkpoint of these fields; takes ownership of them."""
    config = fields.pop("config")
    return Checkpoint(config=partial(with_ids, config), **fields)


#: Families whose models are too large for a test: only their processors are written.
PROCESSORS: dict[str, Callable[[], Checkpoint]] = {
    name: partial(checkpoint, name) for name in ("gemma3n", "phi3_v", "qwen3_omni_moe")
}

CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    name: partial(checkpoint, name)
    for name in TABLE
    if name not in PROCESSORS and name != "deepseek_vl"  # its model is LLaVA's
}
