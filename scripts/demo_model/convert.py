"""Converts trained weights to the MLX model directory: 8-bit, groups of 64, float16 scales.

python -m scripts.demo_model.convert TRAINED_FOLDER TOKENIZER_FOLDER MODEL_FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GROUP_SIZE, BITS = 64, 8
SIZE_LIMIT = 12_000_000  # bytes of the whole directory


def convert(trained: Path, tokenizer: Path, out: Path) -> int:
    """Writes config, quantized weights and tokenizer; returns the directory's size in bytes."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.utils import quantize_model

    config = json.loads((trained / "training_log.json").read_text())["config"]
    ids = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    token_ids = {entry["content"]: entry["id"] for entry in ids}
    ends = [token_ids["<|im_end|>"], token_ids["<|endoftext|>"]]
    config |= {"eos_token_id": ends, "pad_token_id": ends[1], "torch_dtype": "float16"}
    model = Model(ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    for path in sorted(trained.glob("weights*.safetensors")):
        loaded: Any = mx.load(str(path))
        weights |= {name: value.astype(mx.float16) for name, value in loaded.items()}
    model.load_weights(list(weights.items()))
    model, config = quantize_model(model, config, group_size=GROUP_SIZE, bits=BITS)
    out.mkdir(parents=True, exist_ok=True)
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    generation = {
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > SIZE_LIMIT:
        raise ValueError(f"[convert] the model directory has {size} bytes, more than {SIZE_LIMIT}")
    return size


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])), "bytes")
