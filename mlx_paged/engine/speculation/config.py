"""SpeculativeConfig: the options of speculative decoding, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.errors import InvalidParameterError

if TYPE_CHECKING:
    from mlx_paged.model.loader import LoadedModel

#: "ngram" looks drafts up in the sequence's own tokens, "suffix" also in earlier answers. "auto"
#: is "suffix" plus the head of the checkpoint, if there is one. The others use a second model or a
#: head.
METHODS = ("auto", "ngram", "suffix", "draft_model", "eagle3", "mtp", "dflash")
_LOOKS_UP_ALL = ("auto", "suffix")
_WITH_MODEL = ("draft_model", "eagle3", "dflash")
# Further methods of vLLM.
_UNSUPPORTED = ("eagle", "medusa", "mlp_speculator")
_FIELD = "speculative_config"
_DEFAULT_NGRAM = 5
_DEFAULT_TOKENS = 5
_SEQUENTIAL_HEADS = ("eagle3", "mtp")
#: Methods that read hidden states of the model.
HEADS = ("eagle3", "mtp", "dflash")
_DEFAULT_HEAD_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The options of speculative decoding. Names, meanings and defaults are vLLM's, except
    `adaptive` and the method "auto".

    Args:
        method: "auto" is "suffix", and "mtp" where the checkpoint has a head for it. "ngram" and
            "suffix" draft the tokens that followed an earlier occurrence of the latest ones,
            "draft_model" drafts with a smaller model, "eagle3" and "mtp" with a head that reads the
            model's hidden states, and "dflash" or "dspark" with a head that drafts a whole block at
            once. None means "draft_model" if there is a `model` ("eagle3", "dflash" or "dspark" if
            its name contains that), "ngram" if a `prompt_lookup` option is given, and else
            "suffix".
        model: The draft model or head: a path or hub id (or a loaded draft model, in Python). It
            must have the vocabulary of the model that it drafts for. For "mtp", None reads the
            head from the checkpoint of the model.
        num_speculative_tokens: Maximum drafts of a sequence in one step. None:
            `suffix_decoding_max_tree_depth` for "suffix" and "auto" (3 of them by a head), 3 for
            heads, and else 5.
        prompt_lookup_min: Minimum tokens of a match ("ngram").
        prompt_lookup_max: Maximum tokens that are compared ("ngram").
        suffix_decoding_max_tree_depth: Maximum tokens of a match and its drafts together.
        suffix_decoding_max_cached_requests: Maximum finished answers in which drafts are searched,
            besides the sequence itself; 0 searches none.
        suffix_decoding_max_spec_factor: Maximum drafts for each matched token.
        suffix_decoding_min_token_prob: Drafts less likely to be accepted than this are dropped.
        adaptive: Choose the number of drafts in each step so that tokens per second are highest,
            from the measured cost of rows and the share of drafts accepted so far. False verifies
            every draft.

    Raises:
        InvalidParameterError: An invalid value; the error names the field.
    """

    method: str | None = None
    model: str | Path | LoadedModel | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    adaptive: bool = True

    def __post_init__(self) -> None:
        self._resolve_method()
        for name, minimum in (
            ("num_speculative_tokens", 1),
            ("prompt_lookup_min", 1),
            ("prompt_lookup_max", 1),
            ("suffix_decoding_max_tree_depth", 2),
            ("suffix_decoding_max_cached_requests", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                ok = type(value) is int and value >= minimum
                self._check(name, ok, f"an integer of at least {minimum}")
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        self._check("suffix_decoding_max_spec_factor", _is_number(factor) and factor > 0, "above 0")
        self._check("suffix_decoding_min_token_prob", _is_number(prob) and 0 <= prob <= 1, "0 to 1")
        self._check("adaptive", isinstance(self.adaptive, bool), "a boolean")
        self._resolve_lookup()

    def _resolve_method(self) -> None:
        method = self.method
        is_ngram = self.prompt_lookup_min is not None or self.prompt_lookup_max is not None
        if method is None:
            method = "ngram" if is_ngram else "suffix"
            if self.model is not None:
                name = str(self.model).lower() if _is_path(self.model) else ""
                named = (kind for kind in ("eagle3", "dflash", "dspark") if kind in name)
                method = next(named, "draft_model")
            self._set("method", method)
        if isinstance(method, str) and method.endswith("_mtp"):  # vLLM's names by family
            self._set("method", method := "mtp")
        if method == "dspark":  # Its files say which it is.
            self._set("method", method := "dflash")
        expected = f"{' or '.join(map(repr, METHODS))}"
        if method in _UNSUPPORTED:
            expected += f" ({method!r} is not supported yet)"
        self._check("method", isinstance(method, str) and method in METHODS, expected)
        if method in _WITH_MODEL:
            expected = f"a path or hub id for the method {method!r}"
            is_model = method == "draft_model" and _is_model(self.model)
            self._check("model", is_model or _is_path(self.model), expected)
        elif method == "mtp":
            is_path = self.model is None or _is_path(self.model)
            self._check("model", is_path, "a path or hub id, or left out")
        else:
            self._check("model", self.model is None, f"left out for the method {method!r}")
        if is_ngram and method != "ngram":
            name = "prompt_lookup_max" if self.prompt_lookup_min is None else "prompt_lookup_min"
            self._check(name, False, f"left out for the method {method!r}")

    def _resolve_lookup(self) -> None:
        if self.method == "ngram":
            given = [n for n in (self.prompt_lookup_min, self.prompt_lookup_max) if n is not None]
            shortest = self.prompt_lookup_min or min([*given, _DEFAULT_NGRAM])
            longest = (
                self.prompt_lookup_max or max(shortest, *given, 0) if given else _DEFAULT_NGRAM
            )
            self._set("prompt_lookup_min", shortest)
            self._set("prompt_lookup_max", longest)
            self._check(
                "prompt_lookup_min", shortest <= longest, f"at most prompt_lookup_max ({longest})"
            )
        if self.num_speculative_tokens is None:
            default = self.suffix_decoding_max_tree_depth
            if not self.looks_up_all:
                default = (
                    _DEFAULT_HEAD_TOKENS if self.method in _SEQUENTIAL_HEADS else _DEFAULT_TOKENS
                )
            self._set("num_speculative_tokens", default)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise InvalidParameterError(f"{_FIELD}.{name}", expected, getattr(self, name))

    @property
    def looks_up_all(self) -> bool:
        """True if drafts are looked up in the sequence and in earlier answers."""
        return self.method in _LOOKS_UP_ALL

    @property
    def max_drafts(self) -> int:
        """Maximum drafts of a sequence in one step."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def max_model_drafts(self) -> int:
        """Maximum drafts of a sequence that a model or a head makes in one step."""
        is_auto = self.method == "auto"
        return min(self.max_drafts, _DEFAULT_HEAD_TOKENS) if is_auto else self.max_drafts


def speculative_config_of(given: Any) -> SpeculativeConfig | None:
    """Returns the options from themselves, a mapping of them, its JSON text, or None.

    Raises:
        InvalidParameterError: Something else, an unknown name, or an invalid value.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    data = given
    if isinstance(given, str):
        try:
            data = json.loads(given)
        except ValueError as error:
            expected = f"a JSON object (this text is no JSON: {error})"
            raise InvalidParameterError(_FIELD, expected, given) from error
    if not isinstance(data, Mapping):
        raise InvalidParameterError(_FIELD, "None, or a mapping of options", given)
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in data:
        if name not in known:
            expected = f"left out: the options are {', '.join(known)}"
            raise InvalidParameterError(f"{_FIELD}.{name}", expected, data[name])
    return SpeculativeConfig(**data)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, Path)) and value != ""


def _is_model(value: object) -> bool:
    from mlx_paged.model.loader import LoadedModel  # needs mlx

    return isinstance(value, LoadedModel)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
