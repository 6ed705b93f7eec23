"""Memory of one long context in sliding-window models, with and without KV groups.

    python bench/kv_groups.py

Two models with the layers and windows of Gemma 3 and gpt-oss, narrow enough for a CPU, process a
prompt of 32k tokens and generate a few. Blocks in use are counted after every step, and the
resident pages of the pools confirm the counts. The number of blocks does not depend on widths, so
the report multiplies the same counts by the bytes per token of the real models.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import harness

from mlx_paged import LLM, SamplingParams

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.utils import _get_classes, load_tokenizer

from mlx_paged.demo import model_path
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.model.layout import CacheLayout, LayerSpec, Mode
from mlx_paged.model.loader import LoadedModel

BLOCK_SIZE = 32
NUM_GENERATED = 64
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 65536,
}
_GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A narrow model to run, and the real model's layers: (windowed, full, KV heads, dim)."""

    config: dict[str, Any]
    window: int
    real_name: str
    real_layers: tuple[int, int, int, int]

    def real_layout(self) -> CacheLayout:
        """The layers of the real model, in bfloat16."""
        num_windowed, num_full, heads, dim = self.real_layers
        windows = [self.window] * num_windowed + [None] * num_full
        specs = tuple(LayerSpec(heads, dim, dim, mx.bfloat16, window) for window in windows)
        return CacheLayout(Mode.NATIVE, specs, tuple(range(len(specs))))


CASES = {
    "gemma3-like": Case(
        {
            **_NARROW,
            "model_type": "gemma3_text",
            "num_hidden_layers": 12,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
        1024,
        "Gemma 3 4B (29 of 34 layers see 1024 tokens)",
        (29, 5, 4, 256),
    ),
    "gpt-oss-like": Case(
        {
            **_NARROW,
            "model_type": "gpt_oss",
            "num_hidden_layers": 8,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        128,
        "gpt-oss 20B (12 of 24 layers see 128 tokens)",
        (12, 12, 8, 64),
    ),
}


def resident_bytes(pools: Iterable[mx.array]) -> int:
    """Physical memory of the pools; pages that were never written do not count."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, total = mmap.PAGESIZE, 0
    for pool in pools:
        array = np.asarray(memoryview(pool))
        begin = array.ctypes.data // page * page
        num_pages = -(-(array.ctypes.data + array.nbytes - begin) // page)
        states = (ctypes.c_ubyte * num_pages)()
        if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_pages * page), states):
            raise OSError(ctypes.get_errno(), "mincore")
        total += sum(state & 1 for state in states) * page
    return total


def run(name: str, context_len: int, with_groups: bool) -> dict[str, Any]:
    """Runs one context of `context_len` tokens in this process; returns its peak blocks."""
    case = CASES[name]
    model_class, args_class = _get_classes(config=case.config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(case.config))
    loaded = LoadedModel(model, load_tokenizer(model_path()), case.config, name)
    llm = LLM(
        loaded,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=-(-(context_len + NUM_GENERATED) // BLOCK_SIZE) + 1,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        typical_context_len=context_len,
        disable_hybrid_kv_cache_manager=not with_groups,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_GENERATED, ignore_eos=True)
    prompt = np.random.default_rng(0).integers(0, 256, context_len).tolist()
    most_full = most_windowed = 0
    llm.engine.add_request("long", prompt, params)
    answer: list[int] = []
    while llm.engine.has_unfinished:
        answer += [token for u in llm.engine.step() for token in u.token_ids]
        stats = llm.stats()
        most_full = max(most_full, stats.usage.num_used_blocks)
        windowed = stats.group_usage[0] if with_groups else stats.usage
        most_windowed = max(most_windowed, windowed.num_used_blocks)
    caches = llm.engine._runner.model.attention_caches
    pools = [pool for cache in caches for pool in (cache.key_pool, cache.value_pool)]
    return {
        "full_blocks": most_full,
        "windowed_blocks": most_windowed,
        "pool_bytes": sum(pool.nbytes for pool in pools),
        "resident_bytes": resident_bytes(pools),
        "answer": answer,
    }


def in_own_process(name: str, context_len: int, with_groups: bool) -> dict[str, Any]:
    """Runs `run` in its own process."""
    arguments = ["--case", name, "--context", str(context_len)]
    arguments += [] if with_groups else ["--without-groups"]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def at_real_widths(
    case: Case, context_len: int, runs: dict[bool, dict[str, Any]]
) -> dict[str, Any]:
    """Bytes of the blocks, and the number of such contexts that fit in 16 GiB."""
    layout = case.real_layout()
    num_bytes, fitting = {}, {}
    for with_groups, result in runs.items():
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            typical_context_len=context_len,
            disable_hybrid_kv_cache_manager=not with_groups,
        )
        groups = KVCacheConfig(layout, config, 2 * context_len)
        windowed, full = (
            sum(s.bytes_per_token for s in layout.attention if (s.window is None) == is_full)
            for is_full in (False, True)
        )
        blocks = result["windowed_blocks"] * windowed + result["full_blocks"] * full
        num_bytes[with_groups] = blocks * BLOCK_SIZE
        fitting[with_groups] = groups.max_blocks(16 * _GIB) * BLOCK_SIZE // context_len
    return {
        "model": case.real_name,
        "bytes": num_bytes[True],
        "bytes_without_groups": num_bytes[False],
        "saved": 1 - num_bytes[True] / num_bytes[False],
        "contexts_in_16_gib": fitting[True],
        "contexts_in_16_gib_without_groups": fitting[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--without-groups", action="store_true")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run(args.case, args.context, not args.without_groups)))
        return
    results: dict[str, Any] = {"context_len": args.context, "block_size": BLOCK_SIZE, "cases": {}}
    rows = []
    for name, case in CASES.items():
        runs = {flag: in_own_process(name, args.context, flag) for flag in (True, False)}
        if runs[True].pop("answer") != runs[False].pop("answer"):
            raise RuntimeError(f"{name}: the answers with and without KV groups differ")
        real = at_real_widths(case, args.context, runs)
        results["cases"][name] = {
            "with_groups": runs[True],
            "without_groups": runs[False],
            "real_widths": real,
        }
        rows.append(
            [
                name,
                f"{runs[True]['windowed_blocks']} / {runs[False]['windowed_blocks']}",
                f"{runs[True]['resident_bytes'] / 2**20:.1f}",
                f"{runs[False]['resident_bytes'] / 2**20:.1f}",
                f"{real['bytes'] / _GIB:.2f}",
                f"{real['bytes_without_groups'] / _GIB:.2f}",
                f"{real['saved']:.0%}",
                f"{real['contexts_in_16_gib']} / {real['contexts_in_16_gib_without_groups']}",
            ]
        )
    header = ["model", "windowed blocks", "resident MiB", "without", "real GiB", "without", "saved"]
    harness.print_table([*header, "contexts in 16 GiB"], rows)
    print(f"saved to {harness.save('kv_groups', results)}")


if __name__ == "__main__":
    main()
