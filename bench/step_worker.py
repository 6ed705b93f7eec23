"""A process that runs one engine, this package's or vLLM, for `bench/vllm_steps.py`.

    python bench/step_worker.py mlx_paged|vllm

Reads requests from stdin, one JSON object per line: ``{"method": NAME, **arguments}``. Answers each
on stdout with ``{"value": ...}`` or ``{"error": TEXT}``; anything that the engines print goes to
stderr. vLLM's Python environment does not need this package.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

Tokens = list[list[int]]
BLOCK = 32  # tokens of our KV blocks
SEED = 7
# vLLM only checks this at startup: `kv_cache_memory_bytes` sizes its cache.
VLLM_MEMORY_SHARE = 0.02
VLLM_STEP_TOKENS = 8192
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# GPTQ's usual settings, for which vLLM uses Machete on Hopper, and Marlin in experts. The LM head
# is quantized too, as in MLX's checkpoints; routers are not.
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "lm_head": True,
    "modules_in_block_to_quantize": [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "lm_head",
    ],
}


class Engine:
    """The interface of both engines."""

    def load(self) -> None:
        """Imports the engine."""
        raise NotImplementedError

    def start(
        self, name: str, config: dict[str, Any], rows: list[int], max_len: int, pool_tokens: int
    ) -> dict[str, Any]:
        """Creates a model with random weights, and the engine.

        Args:
            name: A key of `CONFIGS`; "4 bits" in it means quantized weights.
            config: The model's config.json.
            rows: Batch sizes that will run.
            max_len: Tokens of the longest sequence.
            pool_tokens: Capacity of the KV cache in tokens.

        Returns:
            The engine's versions.
        """
        raise NotImplementedError

    def generate(self, prompts: Tokens, max_tokens: int, params: dict[str, float]) -> Tokens:
        """Returns one answer per prompt, each with `max_tokens` tokens."""
        raise NotImplementedError


class Ours(Engine):
    """This package's engine."""

    def load(self) -> None:
        import whole_calls  # noqa: F401

    def start(
        self, name: str, config: dict[str, Any], rows: list[int], max_len: int, pool_tokens: int
    ) -> dict[str, Any]:
        import mlx.core as mx
        from whole_calls import random_model

        from mlx_paged import LLM, build_info

        mx.set_default_device(mx.cpu if name == "tiny" else mx.gpu)
        self._llm = LLM(
            random_model(name),
            num_gpu_blocks_override=-(-pool_tokens // BLOCK),
            block_size=BLOCK,
            max_num_seqs=max(rows),
            max_model_len=max_len,
        )
        build = build_info()
        return {key: build[key] for key in ("version", "mlx_version")}

    def generate(self, prompts: Tokens, max_tokens: int, params: dict[str, float]) -> Tokens:
        from mlx_paged import SamplingParams

        chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        return [out.outputs[0].token_ids for out in self._llm.generate(prompts, chosen)]


class Vllm(Engine):
    """vLLM with its defaults, but with CUDA graphs only for the measured batch sizes."""

    def load(self) -> None:
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm  # noqa: F401

    def start(
        self,
        name: str,
        config: dict[str, Any],
        rows: list[int],
        max_len: int,
        pool_tokens: int,
        tensor_parallel_size: int = 1,
    ) -> dict[str, Any]:
        """Creates the model on `tensor_parallel_size` GPUs; see `Engine.start`."""
        quantized = "4 bits" in name
        folder = Path(tempfile.mkdtemp(prefix="vllm-steps-"))
        (folder / "config.json").write_text(json.dumps(vllm_config(config, quantized)))
        from vllm import LLM, __version__

        if quantized:
            fill_quantized_weights()
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max_len,
            max_num_seqs=max(rows),
            max_num_batched_tokens=max(VLLM_STEP_TOKENS, max_len),
            kv_cache_memory_bytes=pool_tokens * kv_bytes(config) // tensor_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=VLLM_MEMORY_SHARE,
            enable_prefix_caching=True,
            cudagraph_capture_sizes=sorted(rows),
        )
        import torch

        return {"version": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}

    def generate(self, prompts: Tokens, max_tokens: int, params: dict[str, float]) -> Tokens:
        from vllm import SamplingParams

        chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **params)
        inputs = [{"prompt_token_ids": tokens} for tokens in prompts]
        outputs = self._llm.generate(inputs, chosen, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outputs]


def vllm_config(config: dict[str, Any], quantized: bool) -> dict[str, Any]:
    """Returns our model's config.json with the fields of Hugging Face's checkpoints."""
    found = {
        **config,
        "architectures": [ARCHITECTURES[config["model_type"]]],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if quantized:
        found["quantization_config"] = GPTQ
    return found


def kv_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes of a token's keys and values in 16 bits."""
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * 2 * config["num_hidden_layers"] * heads)


def fill_quantized_weights() -> None:
    """Patches vLLM's dummy loader to fill quantized weights too.

    It leaves integers uninitialized, and with zeros every row would get the same token, and so the
    same experts. vLLM forks its engine from this process, so the patch applies there.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    fill = dummy_loader.initialize_dummy_weights

    def with_integers(layer: torch.nn.Module, *args: Any, **options: Any) -> None:
        fill(layer, *args, **options)
        for name, weight in layer.named_parameters(recurse=False):
            if name.endswith("qweight"):
                weight.data.random_(-(1 << 31), (1 << 31) - 1)

    dummy_loader.initialize_dummy_weights = with_integers


class Worker:
    """Answers requests about one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompts: Tokens = []

    def load(self) -> None:
        """See `Engine.load`."""
        self._engine.load()

    def start(self, **arguments: Any) -> dict[str, Any]:
        """See `Engine.start`."""
        return self._engine.start(**arguments)

    def prompts(self, lengths: list[int], vocab_size: int) -> None:
        """Creates the prompts of later calls, which depend only on the arguments."""
        rng = np.random.default_rng((SEED, len(lengths), lengths[0]))
        self._prompts = [rng.integers(3, vocab_size, n).tolist() for n in lengths]

    def call(self, max_tokens: int, params: dict[str, float]) -> dict[str, Any]:
        """Generates once.

        Returns:
            ``seconds``, and the number of ``distinct`` last tokens: few of them mean that a step
            uses few experts.

        Raises:
            RuntimeError: An answer has fewer than `max_tokens` tokens.
        """
        gc.collect()
        start = time.perf_counter()
        answers = self._engine.generate(self._prompts, max_tokens, params)
        seconds = time.perf_counter() - start
        if any(len(tokens) != max_tokens for tokens in answers):
            shortest = min(map(len, answers))
            raise RuntimeError(f"answers must have {max_tokens} tokens but one has {shortest}")
        return {"seconds": seconds, "distinct": len({tokens[-1] for tokens in answers})}


ENGINES = {"mlx_paged": Ours, "vllm": Vllm}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(ENGINES[sys.argv[1]]())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(worker, request.pop("method"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
