"""Trains the byte-level BPE tokenizer and writes it with the processor's settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from ..demo_model.tokenizer import train_bpe
from .questions import ABOUT, SYSTEM_PROMPTS, ask, ask_two, chat
from .scenes import SIDE, sample_scene

VOCAB_SIZE = 768
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<end_of_utterance>"
FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
SPECIAL_TOKENS = [PAD, START, END, FAKE, IMAGE, GLOBAL]
IMAGE_TOKENS = 64  # per picture: 8-pixel patches, four of them per token
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] or [] -%}"
    "{%- if 'image' in part['type'] -%}{{- '<image>' -}}"
    "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<end_of_utterance>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def texts(count: int) -> Iterator[str]:
    """Yields the training texts: questions and answers without written strings."""
    random = Random("tokenizer")
    yield from ("user\nassistant\nsystem\n" for _ in range(200))
    for _ in range(count):
        scenes = [sample_scene(random, writing=0.0, mixed=0.0) for _ in range(2)]
        turns = [ask(random, scenes[0]), ask_two(random, *scenes), chat(random, True)]
        for turn in turns:
            yield turn.question
            yield turn.answer
    words = ("digit", "letter", "number", "text", "word", "letters")
    yield from (f"Which {word} is this? the {word} in red. Read the {word}." for word in words * 40)
    yield from (*SYSTEM_PROMPTS * 20, *[ABOUT] * 20)


def train_tokenizer(folder: Path, count: int = 6_000) -> None:
    """Writes tokenizer.json and the files of tokenizer, processor and chat template."""
    train_bpe(
        texts(count),
        folder,
        split=SPLIT,
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Idefics3Processor",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, END, FAKE, IMAGE, GLOBAL],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    picture = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": SIDE},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(picture, indent=2) + "\n")
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
