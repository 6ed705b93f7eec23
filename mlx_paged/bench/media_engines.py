"""Engines that answer prompts with images: this package's, mlx-vlm's own, and both servers.

All get the same text (from the checkpoint's chat template), the same files or frames, the same
weights in the same dtype and the same BLAS. A request's clock starts before its images are read.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_paged import platform

# isort: split
import mlx.core as mx
import numpy as np

from mlx_paged.engine.llm import LLM
from mlx_paged.engine.loading import load
from mlx_paged.engine.media import TextWithMedia
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import MlxPagedError

#: Options of the paged engine, by the name of what it may cache between requests.
CACHES: dict[str, dict[str, Any]] = {
    "all": {},
    "encoder": {"enable_prefix_caching": False},
    # An item larger than the cache passes through it and is not cached.
    "none": {
        "enable_prefix_caching": False,
        "mm_encoder_cache_bytes": 1,
        "media_limits": {"cache_bytes": 0},
    },
}
_SECONDS_TO_START = 300.0


@dataclass(frozen=True)
class Ask:
    """A conversation about images or frames, as a request.

    Attributes:
        texts: Messages of user and assistant in turn; media come before the first text.
        images: Image files.
        video: A file of frames (`numpy.save`, ``[num_frames, height, width, 3]`` uint8), or None.
        prompt: The rendered chat template; empty until it is known.
    """

    texts: tuple[str, ...]
    images: tuple[str, ...] = ()
    video: str | None = None
    prompt: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the form that `LLM.chat` takes."""
        media: list[Any] = [{"type": "image", "image": Path(path)} for path in self.images]
        if self.video is not None:
            media.append({"type": "video", "video": (np.load(self.video), {"fps": FPS})})
        return [
            {
                "role": "user" if i % 2 == 0 else "assistant",
                "content": [*media, text] if i == 0 and media else text,
            }
            for i, text in enumerate(self.texts)
        ]


#: Frame rate of videos.
FPS = 2.0


@dataclass
class Reply:
    """The timings of an answer, in seconds since the request.

    Attributes:
        times: Arrival time of each token.
        token_ids: Empty if an engine returns only text.
        num_prompt_tokens: As the engine counts them; 0: unknown.
        num_encoded: Items that the towers encoded; None: unknown.
        peak_bytes: Peak memory of MLX's arrays meanwhile, including weights and pools; 0: unknown.
        pool_bytes: Bytes of the KV pools, used or not.
    """

    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_encoded: int | None = None
    peak_bytes: int = 0
    pool_bytes: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first."""
        if len(self.times) < 2:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


class PagedEngines:
    """This package's engine on one model, with any choice of caches.

    Args:
        model: Directory or hub id.
        max_tokens: Tokens of prompt and answer of the longest request, which sizes the pool.
        max_num_seqs: Maximum running sequences with all caches; with fewer caches, it is one.
    """

    def __init__(self, model: str, dtype: str, max_tokens: int, max_num_seqs: int) -> None:
        self.model = load(model, dtype=dtype)
        if self.model.media is None:
            reason = self.model.media_reason or "it reads text only"
            raise MlxPagedError(f"{model} takes no pictures: {reason}")
        self._num_blocks = 1 + -(-max_tokens // 32)  # per request
        self._max_num_seqs = max_num_seqs
        self._llms: dict[str, LLM] = {}

    def kinds(self) -> tuple[str, ...]:
        """The media that the model takes."""
        assert self.model.media is not None
        return self.model.media.kinds

    def llm(self, caches: str = "all") -> LLM:
        """Returns the engine that has some of `CACHES`."""
        if caches not in self._llms:
            most = self._max_num_seqs if caches == "all" else 1
            self._llms[caches] = LLM(
                self.model,
                max_num_seqs=most,
                num_gpu_blocks_override=8 + most * self._num_blocks,
                **CACHES[caches],
            )
        return self._llms[caches]

    def prompt_of(self, ask: Ask) -> str:
        """Renders the text of a request; reads no file."""
        [prompt] = self.llm().chat_prompts(ask.messages())
        return prompt.text if isinstance(prompt, TextWithMedia) else ""

    def num_tokens(self, ask: Ask) -> int:
        """Number of prompt tokens of a request, including media."""
        [tokens] = self.llm().render_chats(ask.messages())
        return len(tokens)

    def answer(self, ask: Ask, max_tokens: int, caches: str = "all") -> Reply:
        """Answers one request."""
        [reply] = self.answer_all([ask], max_tokens, caches)
        return reply

    def answer_all(self, asks: Sequence[Ask], max_tokens: int, caches: str = "all") -> list[Reply]:
        """Answers requests that arrive at once; the first result counts all encoded items."""
        llm = self.llm(caches)
        replies = [Reply() for _ in asks]
        before = self._num_encoded(llm)
        mx.reset_peak_memory()
        start = time.perf_counter()
        chats = [ask.messages() for ask in asks]
        prompts = [llm.chat_prompts(chat)[0] for chat in chats]
        for update in llm.stream(prompts, _greedy(max_tokens)):
            if update.error is not None:
                raise update.error
            reply, now = replies[int(update.request_id)], time.perf_counter() - start
            reply.times += [now] * len(update.token_ids)
            reply.token_ids += update.token_ids
        for reply in replies:
            reply.text = llm.tokenizer.decode(reply.token_ids)
            reply.peak_bytes = mx.get_peak_memory()
            reply.pool_bytes = sum(each.engine.pool_bytes for each in self._llms.values())
        replies[0].num_encoded = self._num_encoded(llm) - before
        return replies

    def encoder_cache_bytes(self) -> int:
        """Bytes that the caches hold in the engine that has all of them."""
        stats = self.llm().stats().encoder_cache
        return 0 if stats is None else stats.num_bytes

    @staticmethod
    def _num_encoded(llm: LLM) -> int:
        stats = llm.stats().encoder_cache
        return 0 if stats is None else stats.num_encoded_items

    def text_speed(self, rounds: int, rows: int, max_tokens: int) -> dict[str, Any]:
        """See `media_text.text_speed`."""
        from mlx_paged.bench.media_text import text_speed

        return text_speed(self.llm(), self.model, rounds, rows, max_tokens)

    def beside(
        self, asks: Sequence[Ask], num_tokens: int, rounds: int, rows: int, max_tokens: int
    ) -> dict[str, Any]:
        """See `media_text.beside`."""
        from mlx_paged.bench.media_text import beside

        return beside(self.llm(), asks, num_tokens, rounds, rows, max_tokens)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class VlmEngine:
    """mlx-vlm's own `stream_generate`, unchanged; runs one request after another."""

    def __init__(self, model: str, dtype: str) -> None:
        from mlx_vlm.utils import load as load_vlm

        from mlx_paged.model.loader import convert

        platform.use_supported_device()
        with contextlib.redirect_stdout(sys.stderr):
            self._model, self._processor = load_vlm(model)
        convert(self._model, dtype, keeps_weights=False)
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        tokenizer.stopping_criteria = lambda token: False  # answers of full length
        self._features: Any = None

    def caches(self) -> tuple[str, ...]:
        """Selects the engine's cache: none, or its tower features if the model family allows it."""
        encodes = any(hasattr(self._model, name) for name in ("encode_image", "encode_images"))
        return ("none", "encoder") if encodes else ("none",)

    def answer(self, ask: Ask, max_tokens: int, caches: str = "none") -> Reply:
        """Answers one request, whose `prompt` is known.

        Args:
            caches: One of `caches`.
        """
        from mlx_vlm.generate import stream_generate
        from mlx_vlm.vision_cache import VisionFeatureCache

        more: dict[str, Any] = {}
        if caches == "encoder":
            self._features = self._features or VisionFeatureCache()
            more["vision_cache"] = self._features
        if ask.video is not None:
            # [num_frames, 3, height, width], the layout in which mlx-vlm loads videos.
            more["video"] = [np.ascontiguousarray(np.load(ask.video).transpose(0, 3, 1, 2))]
            more["fps"] = FPS
        reply = Reply()
        mx.reset_peak_memory()
        start = time.perf_counter()
        for found in stream_generate(
            self._model,
            self._processor,
            ask.prompt,
            list(ask.images) or None,
            max_tokens=max_tokens,
            temperature=0.0,
            **more,
        ):
            if found.finish_reason is None:  # The last one carries only the finish reason.
                reply.times.append(time.perf_counter() - start)
                reply.token_ids.append(int(found.token))  # type: ignore[arg-type]
                reply.text += found.text
                reply.num_prompt_tokens = found.prompt_tokens
        reply.peak_bytes = mx.get_peak_memory()
        return reply

    def answer_all(self, asks: Sequence[Ask], max_tokens: int, caches: str = "none") -> list[Reply]:
        """Answers requests one by one; times count from the start of the first."""
        start = time.perf_counter()
        replies = []
        for ask in asks:
            begun = time.perf_counter() - start
            reply = self.answer(ask, max_tokens, caches)
            reply.times = [begun + at for at in reply.times]
            replies.append(reply)
        return replies


# --- Servers --------------------------------------------------------------------------------------


def check_server_packages() -> None:
    """Raises if mlx-vlm's server needs a package that is not installed.

    Raises:
        MlxPagedError: A package is missing.
    """
    needed = {"fastapi": "fastapi", "uvicorn": "uvicorn", "mlx_audio": "mlx-audio"}
    missing = [p for name, p in needed.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise MlxPagedError(
            f"mlx-vlm's server needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


class Server:
    """A server in its own process, called through streaming chat completions.

    Args:
        name: Name for errors.
        command: Starts the server; ``{port}`` stands for the port.
    """

    def __init__(self, name: str, command: Sequence[str], model: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        self.name = name
        self._model = model
        self._url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        words = [word.replace("{port}", str(port)) for word in command]
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self._url}/v1/models", timeout=5).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                told = self._log.read()[-2000:]
                self.close()
                raise MlxPagedError(f"{self.name} did not start: {told}")
            time.sleep(0.2)

    def answer(self, ask: Ask, max_tokens: int) -> Reply:
        """Answers one request; times are the arrival times of text chunks."""
        content: list[Any] = []
        for path in ask.images:
            data = base64.b64encode(Path(path).read_bytes()).decode()
            url = f"data:image/png;base64,{data}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        content.append({"type": "text", "text": ask.texts[0]})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        reply = Reply()
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS_TO_START) as response:
                for now, chunk in _chunks(response, start):
                    if usage := chunk.get("usage"):
                        given = usage.get("prompt_tokens", usage.get("input_tokens"))
                        reply.num_prompt_tokens = int(given or 0)
                    for choice in chunk.get("choices") or ():
                        if text := (choice.get("delta") or {}).get("content"):
                            reply.times.append(now)
                            reply.text += text
        except urllib.error.HTTPError as error:
            told = error.read()[:300].decode(errors="replace")
            raise MlxPagedError(f"{self.name}: {error.code}: {told}") from None
        except OSError as error:
            raise MlxPagedError(f"{self.name}: {error}") from None
        if not reply.times:
            raise MlxPagedError(f"{self.name}: the stream had no text")
        return reply

    def close(self) -> None:
        """Ends the process."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _chunks(response: Any, start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for line in response:
        now = time.perf_counter() - start
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield now, json.loads(data)


def open_server(name: str, model: str) -> Server:
    """Starts a server by engine name: "mlx-paged" or "mlx-vlm"."""
    where = ["--host", "127.0.0.1", "--port", "{port}"]
    if name == "mlx-paged":
        command = [sys.executable, "-m", "mlx_paged.cli.main", "serve", model, *where]
    else:
        check_server_packages()
        command = [sys.executable, "-m", "mlx_vlm.server", "--model", model, *where]
    return Server(f"{name}'s server", command, model)
