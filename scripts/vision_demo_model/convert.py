"""Converts the trained checkpoint to the MLX model directory: 8-bit, groups of 64, float16 scales.

python -m scripts.vision_demo_model.convert TRAINED/hf MODEL_FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GROUP_SIZE, BITS = 64, 8
SIZE_LIMIT = 6_000_000  # bytes of the whole directory


def convert(trained: Path, out: Path) -> int:
    """Writes config, quantized weights, tokenizer and processor; returns the size in bytes."""
    import mlx.core as mx

    loaded: Any = mx.load(str(trained / "model.safetensors"))
    tensors: dict[str, mx.array] = {}
    for name, value in loaded.items():
        quantized = value.ndim == 2 and value.shape[-1] % GROUP_SIZE == 0 and "position" not in name
        if "patch_embedding.weight" in name:
            value = value.transpose(0, 2, 3, 1)
        if not quantized:
            tensors[name] = value.astype(mx.float16)
            continue
        stem = name.removesuffix(".weight")
        packed, scales, biases = mx.quantize(value, group_size=GROUP_SIZE, bits=BITS)
        tensors |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), tensors, metadata={"format": "mlx"})
    config = json.loads((trained / "config.json").read_text())
    quantization = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    config |= {"quantization": quantization, "quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    for path in trained.glob("*.json"):
        if path.name != "config.json":
            shutil.copyfile(path, out / path.name)
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > SIZE_LIMIT:
        raise ValueError(f"[convert] the model directory has {size} bytes, more than {SIZE_LIMIT}")
    return size


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])), "bytes")
