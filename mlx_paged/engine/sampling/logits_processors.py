"""Logits processors: biases and bans, penalties and masks, applied before a token is chosen.

They touch only those entries of ``[num_rows, vocab_size]`` that change, and compute only what a row
requests. The newest token of a row may still be on the device; anything that depends on it is
computed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.engine.faults import is_interrupt, reason_of
from mlx_paged.engine.grammar.matcher import Words
from mlx_paged.engine.sampling.masks import Mask, MaskKey, MaskSource
from mlx_paged.errors import InvalidParameterError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

#: Stands in `Additions.after` for an addition that does not depend on the newest token.
ALWAYS = -1


class Additions(NamedTuple):
    """Values to add to single logits: biases, and -inf for banned tokens.

    An addition may depend on the newest token of the row, which may still be on the device.
    """

    ids: IntArray  # [m]; an id may repeat with -inf
    values: FloatArray  # [m]
    after: IntArray  # [m]; the newest token after which the addition applies; ALWAYS: any


class Penalties(NamedTuple):
    """Tokens that a row has had, without the newest one if that is still on the device."""

    ids: IntArray  # [m], no id twice
    counts: IntArray  # [m]: times the answer has it; 0: only the prompt does
    repetition: float
    presence: float
    frequency: float


_NONE, _ONE = np.zeros(0, np.int32), np.zeros(1, np.int32)
_NO_ADDITIONS = Additions(_NONE, np.zeros(0, np.float32), _NONE)
_NO_PENALTIES = Penalties(_NONE, _NONE, 1.0, 0.0, 0.0)


class LogitEdits(NamedTuple):
    """Changes to a row's logits before a token is chosen. Plain data.

    Attributes:
        allowed: The only tokens that may follow.
        mask: Name of the row's token mask, which the `MaskSource` makes once the newest token is
            known; None if it has none.
        grammar: Name of the row's position in its grammar, likewise.
        failure: Why the edits could not be made; then no token can be chosen.
    """

    additions: Additions | None = None
    penalties: Penalties | None = None
    allowed: Mask | None = None
    mask: MaskKey | None = None
    grammar: MaskKey | None = None
    failure: str | None = None

    @property
    def has_mask(self) -> bool:
        """True if a mask may rule out any token."""
        found = self.allowed, self.mask, self.grammar, self.failure
        return any(part is not None for part in found)


class InFlight(NamedTuple):
    """The newest tokens of rows whose previous step is still sampling them."""

    tokens: mx.array  # [num_samples of the step before] int32
    source: IntArray  # [num_rows] index into `tokens`; -1: the row's newest token is known
    reported: mx.array  # the same as `tokens`, for the host; -1: none

    def on_host(self) -> list[int | None]:
        """Waits for the newest tokens and returns them; None also for a row whose step failed.

        It reads `reported` directly, because an operation on it would queue behind the step
        launched since. With CUDA, reading `tokens` would take them away from that step.
        """
        tokens = np.array(self.reported)
        return [None if i < 0 or tokens[i] < 0 else int(tokens[i]) for i in self.source]


class TokenHistory:
    """Grows with its sequence; a step's cost depends only on the new tokens.

    Args:
        prompt: Tokens that count as seen, though never generated.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        seen = np.unique(np.array(prompt, dtype=np.int32))
        self._entry = {int(token): i for i, token in enumerate(seen)}
        self._ids = np.resize(seen, 2 * len(seen) + 64) if len(seen) else np.zeros(64, np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        self._num_generated = 0

    def update(self, tokens: Sequence[int], start: int) -> None:
        """Adds the new tokens of an answer, whose tokens are `tokens[start:]` so far."""
        for token in tokens[start + self._num_generated :]:
            entry = self._entry.setdefault(token, len(self._entry))
            if entry == len(self._ids):
                self._ids = np.resize(self._ids, 2 * entry)
                self._counts = np.concatenate([self._counts, np.zeros(entry, np.int32)])
            self._ids[entry] = token
            self._counts[entry] += 1
        self._num_generated = max(self._num_generated, len(tokens) - start)

    def with_drafts(self, drafts: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Copies of `ids` and `counts` as if the answer had some more tokens."""
        ids, counts = self.ids.copy(), self.counts.copy()
        fresh: dict[int, int] = {}
        for token in drafts:
            entry = self._entry.get(token)
            if entry is None:
                fresh[token] = fresh.get(token, 0) + 1
            else:
                counts[entry] += 1
        if fresh:
            ids = np.concatenate([ids, np.array(list(fresh), np.int32)])
            counts = np.concatenate([counts, np.array(list(fresh.values()), np.int32)])
        return ids, counts

    @property
    def ids(self) -> IntArray:
        """``[num_distinct]``; a view that the next `update` may change."""
        return self._ids[: len(self._entry)]

    @property
    def counts(self) -> IntArray:
        """``[num_distinct]``: times each of `ids` was generated; a view like `ids`."""
        return self._counts[: len(self._entry)]


class Edited(NamedTuple):
    """The result of `apply_edits`."""

    # [num_rows, vocab_size]; float32 unless they are only masked.
    logits: mx.array
    failed: dict[int, str]  # rows whose mask failed, with the reason; all their logits are -inf


def apply_edits(
    logits: mx.array,
    edited: list[tuple[int, LogitEdits]],
    in_flight: InFlight | None,
    masks: MaskSource | None = None,
) -> Edited:
    """Applies the rows' edits, in vLLM's order: mask, biases and bans, penalties.

    Args:
        logits: ``[num_rows, vocab_size]``.
        edited: (row, edits) in the order of rows, for rows with edits.
        in_flight: Location of the newest tokens; None if all are known.
        masks: Makes masks; required if `awaits_masks`.
    """
    failed: dict[int, str] = {}
    if not edited:
        return Edited(logits, failed)
    edits = logits
    if any(edit.has_mask for _, edit in edited):
        edits = _apply_masks(edits, edited, in_flight, masks, failed)
    if only_masks(edited):
        return Edited(edits, failed)
    edits = edits.astype(mx.float32)
    changed = [(i, edit) for i, edit in edited if edit.additions or edit.penalties]
    return Edited(_change(edits, changed, in_flight), failed)


def _change(
    logits: mx.array, edited: list[tuple[int, LogitEdits]], in_flight: InFlight | None
) -> mx.array:
    """Applies additions and penalties; see `ops.edit_logits`."""
    rows = np.empty((len(edited), 5), np.int32)
    factors = np.empty((len(edited), 3), np.float32)
    entries, values, end = [], [], 0
    for row, own, (i, edit) in zip(rows, factors, edited):
        ids, added, after = edit.additions or _NO_ADDITIONS
        seen = edit.penalties or _NO_PENALTIES
        begin, middle, end = end, end + len(ids), end + len(ids) + len(seen.ids)
        row[:] = i, -1 if in_flight is None else in_flight.source[i], begin, middle, end
        own[:] = seen.repetition, seen.presence, seen.frequency
        entries += [(ids, after), (seen.ids, seen.counts)]
        values += [added, np.zeros(len(seen.ids), np.float32)]
        assert in_flight is not None or (after == ALWAYS).all(), "an addition awaits a token"
    if not end:  # The operation requires an entry; no row has this one.
        entries, values = [(_ONE, _ONE)], [np.zeros(1, np.float32)]
    table = np.stack([np.concatenate(column) for column in zip(*entries)], axis=1)
    columns = rows, factors, table, np.concatenate(values), _ONE
    at, penalties, table_on_device, additions, unused = ops.upload(*columns)
    newest = unused if in_flight is None else in_flight.tokens
    return ops.edit_logits(logits, at, penalties, table_on_device, additions, newest)


def only_masks(edited: list[tuple[int, LogitEdits]]) -> bool:
    """Returns True if the edits keep every logit that is not finite."""
    return all(edit.additions is None and edit.penalties is None for _, edit in edited)


def awaits_masks(edited: list[tuple[int, LogitEdits]]) -> bool:
    """True if the host makes masks for these edits, once it knows the newest tokens."""
    return any(edit.grammar is not None or edit.mask is not None for _, edit in edited)


def _apply_masks(
    logits: mx.array,
    edited: list[tuple[int, LogitEdits]],
    in_flight: InFlight | None,
    masks: MaskSource | None,
    failed: dict[int, str],
) -> mx.array:
    masked = [(i, edit) for i, edit in edited if edit.has_mask]
    newest: Sequence[int | None] = [None] * (masked[-1][0] + 1)
    if in_flight is not None and awaits_masks(masked):
        newest = in_flight.on_host()
    words = _words(masked, newest, -(-logits.shape[1] // 32), masks, failed)
    for index, (i, edit) in enumerate(masked):
        if edit.allowed is not None:
            words[index] &= packed(edit.allowed, logits.shape[1])
        if edit.failure is not None:
            failed[i] = edit.failure
            words[index] = 0
        if edit.mask is None:
            continue
        assert masks is not None, "an edit names a token mask, but there is no source of masks"
        try:
            mask = masks.token_mask(edit.mask, newest[i])
            if mask is not None:
                words[index] &= packed(mask, logits.shape[1])
        except BaseException as error:
            # A caller's callback: its exceptions, even SystemExit, must not end other requests.
            if is_interrupt(error):
                raise
            failed[i] = reason_of(error)
            words[index] = 0
    rows = np.array([i for i, _ in masked], dtype=np.int32)
    at, bitmask = ops.upload(rows, words)
    return ops.apply_token_bitmask(logits, bitmask, at)


def _words(
    masked: list[tuple[int, LogitEdits]],
    newest: Sequence[int | None],
    num_words: int,
    masks: MaskSource | None,
    failed: dict[int, str],
) -> Words:
    """Returns the grammars' masks ``[len(masked), num_words]``, full for rows without a grammar."""
    keys = [edit.grammar for _, edit in masked if edit.grammar is not None]
    if not keys:
        return np.full((len(masked), num_words), -1, np.int32)
    assert masks is not None, "an edit names a grammar's mask, but there is no source of masks"
    indices = [index for index, (_, edit) in enumerate(masked) if edit.grammar is not None]
    rows = [masked[index][0] for index in indices]
    made = masks.grammar_masks(keys, [newest[row] for row in rows])
    failed |= {rows[index]: reason for index, reason in made.failed.items()}
    if len(keys) == len(masked) and made.words.shape[1] == num_words:
        return made.words
    words = np.full((len(masked), num_words), -1, np.int32)
    words[indices] = made.words[:, :num_words]
    return words


def packed(mask: Mask, vocab_size: int) -> Words:
    """``[ceil(vocab_size / 32)]``; ids beyond the mask's end are not tokens."""
    num_words = -(-vocab_size // 32)
    words = np.zeros(num_words, np.int32)
    flat = np.asarray(mask)
    if flat.ndim == 1 and flat.dtype == np.bool_ and len(flat) <= vocab_size:
        octets = np.packbits(flat.view(np.uint8), bitorder="little")
        words.view(np.uint8)[: len(octets)] = octets
        return words
    if flat.ndim == 1 and flat.dtype in (np.int32, np.uint32) and len(flat) <= num_words:
        words[: len(flat)] = flat.view(np.int32)
        return words
    raise InvalidParameterError(
        "token_mask",
        f"at most {vocab_size} booleans or {num_words} (u)int32, 32 tokens to each",
        f"{flat.dtype} of shape {flat.shape}",
    )
