"""The text of an answer that nobody waits for: made where it is read, when it is read.

A step needs the text of an answer only to look for stop strings. Decoding a token takes mlx-lm's
detokenizers a microsecond or more, so answers without stop strings leave that to their readers:
the engine's thread keeps token ids, and a reader pays for its own text, on its own thread.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from mlx_paged.engine.faults import reason_of
from mlx_paged.engine.text_stream import TextStream
from mlx_paged.errors import StepError


class DeferredText:
    """Decodes an answer's tokens one by one and in order, as far as somebody has read.

    So each token's text is what `TextStream` would have given in the step that brought it, whatever
    is read when, and by how many threads.

    Args:
        request_id: whose it is, for errors.
        stream: without stop strings; it belongs to this object from now on.
        tokens: prompt and answer; the engine's thread appends.
        start: where the answer begins.
    """

    def __init__(
        self, request_id: str, stream: TextStream, tokens: Sequence[int], start: int
    ) -> None:
        self._request_id = request_id
        self._stream = stream
        self._tokens = tokens
        self._start = start
        self._num_text_tokens: int | None = None  # once the answer has ended
        self._ends = array("Q", [0])  # length of the text after so many tokens
        self._is_flushed = False
        self._lock = threading.Lock()

    def end(self, num_text_tokens: int) -> None:
        """The answer has ended; tokens after so many are no text (the one that ended it)."""
        self._num_text_tokens = num_text_tokens

    def between(self, begin: int, end: int | None) -> str:
        """What became certain after the first `begin` tokens, up to `end` (None: by the answer's
        end).

        Raises:
            StepError: the tokenizer cannot decode a token.
        """
        with self._lock:
            self._decode(end)
            first = self._ends[begin]
            return self._stream.text[first : None if end is None else self._ends[end]]

    def whole(self) -> str:
        """All of it so far; with what was held back, once the answer has ended.

        Raises:
            StepError: the tokenizer cannot decode a token.
        """
        with self._lock:
            self._decode(None)
            return self._stream.text

    @property
    def decoded(self) -> str:
        """What has been decoded by now."""
        return self._stream.text

    def _decode(self, num_tokens: int | None) -> None:
        """Catches up with the first `num_tokens` tokens; None: with all, and the end."""
        stop = self._num_text_tokens if num_tokens is None else num_tokens
        if stop is None:
            stop = len(self._tokens) - self._start
        try:
            for i in range(self._start + len(self._ends) - 1, self._start + stop):
                self._stream.add(self._tokens[i])
                self._ends.append(len(self._stream.text))
            if num_tokens is None and self._num_text_tokens is not None and not self._is_flushed:
                self._stream.finish()
                self._is_flushed = True
        except Exception as error:
            raise StepError(self._request_id, reason_of(error)) from error
