"""A child that is forked after the drop-in was used is told so; it would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.kept_modules import KEEPS_MODULES
from support.models import embedded, save_tiny, tiny_config

TIMEOUT = 300
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

SCRIPT = """
import copy, os, pickle, sys, threading
import mlx_paged
import mlx.core as mx
import mlx_lm
from mlx_lm.models import cache as cache_module
from mlx_paged import drop_in
from mlx_paged.drop_in.registry import entry_of
from mlx_paged.errors import ForkedProcessError

model, tokenizer = mlx_lm.load(sys.argv[1])
step = sys.modules["mlx_lm.generate"].generate_step
Batch = sys.modules["mlx_lm.generate"].BatchGenerator

def in_child(function):
    pid = os.fork()
    if pid == 0:
        function()
        sys.stdout.flush()
        os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 3, code

def works():
    assert mlx_lm.generate(model, tokenizer, "def f", max_tokens=4)

def is_told():
    calls = {
        "generate": lambda: mlx_lm.generate(model, tokenizer, "def f", max_tokens=4),
        "stream_generate": lambda: next(mlx_lm.stream_generate(model, tokenizer, "def f")),
        "batch_generate": lambda: mlx_lm.batch_generate(model, tokenizer, [[5, 6]], max_tokens=2),
        "generate_step": lambda: next(step(mx.array([5]), model, prompt_cache=caches)),
        "a step that runs": lambda: next(running),
        "BatchGenerator": lambda: Batch(model),
        "insert": lambda: batch.insert([[5, 6]]),
        "next": lambda: batch.next(),
        "extract_cache": lambda: batch.extract_cache([uid]),
        "make_prompt_cache": lambda: cache_module.make_prompt_cache(model),
        "save_prompt_cache": lambda: cache_module.save_prompt_cache("/dev/null", caches),
        "trim_prompt_cache": lambda: cache_module.trim_prompt_cache(caches, 1),
        "deepcopy": lambda: copy.deepcopy(caches),
        "pickle": lambda: pickle.dumps(caches[0]),
        "state": lambda: caches[0].state,
        "update_and_fetch": lambda: caches[0].update_and_fetch(*dense),
        "a call of the model": lambda: model(mx.array([[1]]), cache=caches),
        "stats": lambda: drop_in.stats(model),
        "store": lambda: drop_in.store(model).clear(),
        "limit": lambda: setattr(store, "limit", 5),
        "an engine": lambda: mlx_paged.LLM(),
    }
    for name, call in calls.items():
        try:
            call()
        except ForkedProcessError as error:
            assert str(os.getppid()) in str(error) and "spawn" in str(error), error
        except BaseException as error:
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
            os._exit(4)
        else:
            print(f"{name} came back", file=sys.stderr, flush=True)
            os._exit(5)

caches = cache_module.make_prompt_cache(model)
for _ in step(mx.array([5, 6, 7]), model, max_tokens=3, prompt_cache=caches):
    pass
running = step(mx.array([5, 6, 7]), model, max_tokens=9)
next(running)
batch = Batch(model, max_tokens=20)
[uid] = batch.insert([[5, 6, 7]])
batch.next()
dense = caches[0].keys_and_values()
store = drop_in.store(model)
# Another thread has the locks at the moment of the fork.
has_lock, is_done = threading.Event(), threading.Event()
def hold():
    with entry_of(model).lock:
        has_lock.set()
        is_done.wait()
thread = threading.Thread(target=hold)
thread.start()
has_lock.wait()
in_child(is_told)
is_done.set()
thread.join()
assert len(list(running)) == 8  # the parent goes on
assert batch.next_generated()
assert caches[0].trim(1) == 1
works()
left_open = [
    step(mx.array([5, 6, 7]), model, max_tokens=9),
    mlx_lm.stream_generate(model, tokenizer, "def f", max_tokens=9, draft_model=model),
]
for each in left_open:
    next(each)
"""


def test_a_forked_child_is_told_instead_of_hanging(tmp_path) -> None:
    # (The embedded model is quantized, and a CPU takes seconds for a prompt.)
    save_tiny(tmp_path / "model", tiny_config("llama", vocab_size=embedded().vocab_size))
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_MODULES + SCRIPT, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    # Only our files: mlx-lm's own speculative loop fails when it is dropped at exit.
    assert "mlx_paged/drop_in" not in done.stderr
