"""Records llama.cpp's logits of the small GGUF models in `tests/support/gguf_cases.py`.

python scripts/record_llama_cpp.py LIBRARIES BINDINGS

LIBRARIES is a folder with llama.cpp's shared libraries (`cmake -DBUILD_SHARED_LIBS=ON`, target
`llama`), BINDINGS the unpacked source distribution of llama-cpp-python, whose `vendor/llama.cpp`
they were built from. It writes `tests/data/llama_cpp_logits.json`, which
`tests/gguf_files/test_architectures.py` compares with. llama.cpp computes in float32 here: weights
and KV cache are F32, and flash attention is off.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.gguf_cases import CASES, UNLIKE_LLAMA_CPP  # noqa: E402
from support.gguf_files import TOKENS, random_model, write_model  # noqa: E402

FILE = ROOT / "tests" / "data" / "llama_cpp_logits.json"
F32 = 0  # ggml's number of the type


def bindings(libraries: Path, folder: Path) -> Any:
    """llama-cpp-python's ctypes module, without the package around it."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(libraries.resolve())
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(folder / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def logits(llama: Any, path: Path, tokens: list[int]) -> np.ndarray:
    """Logits ``[vocab]`` float32 of the last token."""
    model = llama.llama_model_load_from_file(bytes(path), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp refuses {path.name}")
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.type_k = options.type_v = F32
    options.flash_attn_type = 0
    options.n_threads = options.n_threads_batch = 1
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
    if llama.llama_decode(context, batch):
        raise SystemExit(f"llama.cpp fails on {path.name}")
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    pointer = llama.llama_get_logits_ith(context, len(tokens) - 1)
    found = np.ctypeslib.as_array(pointer, (size,)).copy()
    llama.llama_free(context)
    llama.llama_model_free(model)
    return found


def main() -> None:
    libraries, folder = map(Path, sys.argv[1:])
    llama = bindings(libraries, folder)
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    recorded = {}
    with tempfile.TemporaryDirectory() as work:
        for name, case in CASES.items():
            if name in UNLIKE_LLAMA_CPP:
                continue
            path = write_model(Path(work, "model.gguf"), case, random_model(case.config))
            recorded[name] = [float(f"{x:.7g}") for x in logits(llama, path, TOKENS)[::4]]
            print(name)
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
