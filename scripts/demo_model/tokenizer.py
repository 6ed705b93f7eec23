"""Trains the byte-level BPE tokenizer and writes it as a Hugging Face fast tokenizer directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

VOCAB_SIZE = 4096
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, START, END]
# Split for code: words include one leading character ("_name", "(self", ".join"), digits form
# groups of up to three, and indentation stays whole.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{{- (message['content'] or '') | trim + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_bpe(
    texts: Iterable[str],
    folder: Path,
    *,
    split: str,
    vocab_size: int,
    special_tokens: Sequence[str],
    max_token_length: int | None = None,
) -> None:
    """Trains a byte-level BPE and writes tokenizer.json.

    Args:
        split: Pattern of the pieces that are tokenized separately.
        special_tokens: Tokens with the first ids.
        max_token_length: Maximum bytes of a token; None: no limit.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=max_token_length,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def train_tokenizer(texts: Iterable[str], folder: Path, max_length: int = 4096) -> None:
    """Trains a BPE of `VOCAB_SIZE` entries and writes tokenizer.json and tokenizer_config.json."""
    train_bpe(
        texts,
        folder,
        split=SPLIT,
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        max_token_length=24,
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
