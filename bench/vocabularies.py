"""Byte-level BPE tokenizers of a given size, learned from the texts of this Python installation.

The cost of a grammar step depends on the words of a vocabulary, and the embedded model has only
4,096. A tokenizer is learned once (minutes for 152k) and kept in ``build/vocabularies``.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "build/vocabularies"
SUFFIXES = {".py", ".md", ".txt", ".rst", ".json", ".html", ".js"}
EOS, PAD = "<|end|>", "<|pad|>"


def texts(most_bytes: int) -> Iterator[str]:
    """Files of the standard library and of installed packages, in a fixed order."""
    left = most_bytes
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            text = path.read_text(errors="ignore")[: 1 << 20]
            left -= len(text)
            if left < 0:
                return
            yield text


def learn(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens, including end and padding."""
    tokenizer = Tokenizer(models.BPE())
    # Splits words, numbers of up to three digits, and punctuation, like GPT-4 and Qwen.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    from tokenizers import Regex

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(size * 2000), trainer)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(
            f"the texts here give {tokenizer.get_vocab_size()} tokens and not {size}: install more "
            "packages, or copy build/vocabularies from another machine"
        )
    return tokenizer


def tokenizer_of(size: int, folder: Path = FOLDER) -> TokenizerWrapper:
    """mlx-lm's tokenizer of a given size; learned if `folder` has none."""
    path = folder / f"{size}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        learned = learn(size)
        temporary = path.with_suffix(".part")
        learned.save(str(temporary))
        temporary.rename(path)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path)), eos_token=EOS, pad_token=PAD
    )
    return TokenizerWrapper(fast, eos_token_ids=[fast.eos_token_id])


if __name__ == "__main__":
    for size in (32_000, 151_936):
        print(size, json.dumps(tokenizer_of(size).encode('{"name": "Ada", "age": 36}')))
