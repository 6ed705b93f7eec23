"""Writes random checkpoints in the shapes of known models, as GGUF files and for MLX.

Values do not affect a dense model's time, so all tensors repeat one pool of normal numbers. A file
has a temporary name until it is complete; existing files are kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 64  # group size of MLX's affine formats
POOL = 1 << 22  # number of random values that tensors repeat
GGUF_FORMATS = ("f32", "bf16", "q8_0", "q4_0")
MLX_FORMATS = ("float32", "bfloat16", "8bit", "4bit")


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama with tied embeddings."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    rope_theta: float
    context: int = 8192
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """The contents of Hugging Face's config.json."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "vocab_size": self.vocab,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.context,
        }

    def gguf_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes (rows, columns) in NumPy's order."""
        kv = self.kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        for i in range(self.layers):
            for name, shape in (
                ("attn_norm", (self.hidden,)),
                ("attn_q", (self.hidden, self.hidden)),
                ("attn_k", (kv, self.hidden)),
                ("attn_v", (kv, self.hidden)),
                ("attn_output", (self.hidden, self.hidden)),
                ("ffn_norm", (self.hidden,)),
                ("ffn_gate", (self.intermediate, self.hidden)),
                ("ffn_up", (self.intermediate, self.hidden)),
                ("ffn_down", (self.hidden, self.intermediate)),
            ):
                yield f"blk.{i}.{name}.weight", shape


SHAPES = {
    "1b": Shape(2048, 16, 8192, 32, 8, 128256, 500000.0),  # Llama-3.2-1B
    "135m": Shape(576, 30, 1536, 9, 3, 49152, 10000.0),  # SmolLM2-135M
    "tiny": Shape(128, 2, 256, 4, 2, 4096, 10000.0),  # smoke test
}


def write_gguf(shape: Shape, format: str, path: Path) -> Path:
    """Writes all matrices in one format of `GGUF_FORMATS` and norms in float32; the vocabulary has
    bytes, numbers, and no useful merges."""
    if path.exists():
        return path
    if format not in GGUF_FORMATS:
        raise ValueError(f"format must be one of {GGUF_FORMATS} but got {format!r}")
    try:
        import gguf
    except ImportError:
        raise SystemExit("GGUF files need the package gguf: pip install gguf") from None
    kind = gguf.GGMLQuantizationType[format.upper()]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [*byte_names(), *(f"<{i}>" for i in range(256, shape.vocab))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocab)
    writer.add_token_merges(["\u0120 t"])  # The list must not be empty.
    writer.add_bos_token_id(shape.vocab - 2)
    writer.add_eos_token_id(shape.vocab - 1)
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32) * np.float32(0.02)
    widths = {dims[-1] for _, dims in shape.gguf_tensors() if len(dims) == 2}
    rows = {
        width: gguf.quants.quantize(pool[: POOL // width * width].reshape(-1, width), kind)
        for width in widths
    }
    for name, dims in shape.gguf_tensors():
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
        else:
            many = rows[dims[1]]
            data = np.resize(many, (dims[0], many.shape[1]))
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def byte_names() -> list[str]:
    """Returns a printable character for each byte, as in GPT-2's vocabulary."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    names = {byte: chr(byte) for byte in seen}
    names |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def write_mlx(shape: Shape, format: str, folder: Path) -> Path:
    """Writes mlx-lm's format with the embedded model's tokenizer, whose texts mean nothing."""
    if folder.exists():
        return folder
    if format not in MLX_FORMATS:
        raise ValueError(f"format must be one of {MLX_FORMATS} but got {format!r}")
    import mlx_paged.extension  # noqa: F401  (BLAS before mlx)

    # isort: split
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_map_with_path
    from mlx_lm.models import llama
    from mlx_lm.utils import save_model

    from mlx_paged.demo import model_path

    mx.set_default_device(mx.cpu)
    dtype = mx.float32 if format == "float32" else mx.bfloat16
    config = {**shape.config(), "torch_dtype": str(dtype).removeprefix("mlx.core.")}
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32) * np.float32(0.02)

    def random(path: str, array: mx.array) -> mx.array:
        if array.ndim == 1:
            return mx.ones(array.shape, dtype)
        return mx.array(np.resize(pool, array.shape)).astype(dtype)

    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map_with_path(random, model.parameters()))
    if format.endswith("bit"):
        bits = int(format.removesuffix("bit"))
        nn.quantize(model, group_size=GROUP, bits=bits)
        config["quantization"] = {"group_size": GROUP, "bits": bits}
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(partial, model, donate_model=True)
    (partial / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_path()) / name, partial / name)
    partial.rename(folder)
    return folder
