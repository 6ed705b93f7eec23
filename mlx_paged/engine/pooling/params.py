"""Parameters of embeddings: an engine's pooling, and a request's choices. Names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal

from mlx_paged.core import StopPolicy
from mlx_paged.errors import InvalidParameterError, UnsupportedModelError

RUNNERS = ("auto", "generate", "pooling")
LAST, MEAN = "LAST", "MEAN"
_TYPES = (LAST, MEAN)

# vLLM's old and new names for one field.
_SYNONYMS = {"seq_pooling_type": "pooling_type", "use_activation": "normalize"}
# Kinds of modules of sentence-transformers that are looked at; others are refused.
_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
# Its names of pooling, as a word and as a flag.
_MODES = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}
# Fields of a config.json, with the values that mean bidirectional attention.
_BIDIRECTIONAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("is_causal", (False,)),
    ("use_bidirectional_attention", (True, "all")),
)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How an engine pools a text into one vector. None means the model's setting or the default.

    Args:
        pooling_type: "LAST" (the default) takes the hidden state of the last token, "MEAN" the mean
            over all tokens.
        normalize: Scale vectors to length 1 (the default).
        dimensions: Keep only this many leading dimensions unless a request says otherwise; None
            keeps all.
        classifier_from_token: Score pairs of texts instead of embedding them, for rerankers that
            answer with a word. With two tokens, such as ("no", "yes"), the score is the probability
            of the second against the first; with one token, the sigmoid of its logit.

    Raises:
        InvalidParameterError: An invalid value; the error names the field.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    classifier_from_token: Sequence[str] | None = None

    def __post_init__(self) -> None:
        kind = self.pooling_type
        if kind is not None:
            upper = kind.upper() if isinstance(kind, str) else kind
            if upper not in _TYPES:
                raise InvalidParameterError("pooler_config.pooling_type", "'LAST' or 'MEAN'", kind)
            object.__setattr__(self, "pooling_type", upper)
        _check_boolean("pooler_config.normalize", self.normalize)
        _check_dimensions("pooler_config.dimensions", self.dimensions)
        tokens = self.classifier_from_token
        if tokens is not None:
            field = "pooler_config.classifier_from_token"
            is_list = isinstance(tokens, (list, tuple)) and len(tokens) in (1, 2)
            if not is_list or not all(isinstance(token, str) for token in tokens):
                raise InvalidParameterError(field, "a list of one token or two", tokens)
            if self.pooling_type == MEAN or self.dimensions is not None:
                expected = "None with pooling_type MEAN or dimensions, which mean nothing to it"
                raise InvalidParameterError(field, expected, tokens)
            object.__setattr__(self, "classifier_from_token", tuple(tokens))

    @classmethod
    def of(cls, given: Any) -> PoolerConfig:
        """Returns a config from a mapping with its fields or vLLM's other names; None: the default.

        Raises:
            InvalidParameterError: Something else, or an unknown name.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise InvalidParameterError("pooler_config", f"an object of {', '.join(names)}", given)
        found: dict[str, Any] = {}
        for name, value in given.items():
            field = _SYNONYMS.get(name, name)
            if field not in names:
                raise InvalidParameterError("pooler_config", f"of {', '.join(names)}", name)
            if field in found and found[field] != value:
                raise InvalidParameterError(
                    f"pooler_config.{field}", f"given once, or the same as {name}", found[field]
                )
            found[field] = value
        return cls(**found)

    def over(self, other: PoolerConfig) -> PoolerConfig:
        """Returns this config with its None fields taken from another."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return PoolerConfig(**{n: getattr(other, n) if v is None else v for n, v in chosen.items()})


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How to pool one request.

    Args:
        dimensions: Keep only this many leading dimensions, for models trained for that
            (Matryoshka); normalized vectors are scaled to length 1 afterwards. None keeps all.
        normalize: Scale the vector to length 1; None: as in the engine's `PoolerConfig`. For a
            model that classifies: convert its outputs to probabilities (None means yes).
        truncate_prompt_tokens: Keep only this many of the prompt's last tokens; -1 keeps as many as
            the model accepts; None keeps all. `LLM` truncates; `Engine` gets truncated prompts.
        truncation_side: "right" keeps the first tokens instead.

    Raises:
        InvalidParameterError: An invalid value; the error names the field.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"

    logprobs: ClassVar[None] = None  # never reported

    def __post_init__(self) -> None:
        _check_dimensions("dimensions", self.dimensions)
        _check_boolean("normalize", self.normalize)
        limit = self.truncate_prompt_tokens
        if limit is not None and (not _is_integer(limit) or (limit != -1 and limit < 1)):
            raise InvalidParameterError(
                "truncate_prompt_tokens", "None, -1 or an integer of at least 1", limit
            )
        if self.truncation_side not in ("left", "right"):
            raise InvalidParameterError(
                "truncation_side", "'left' or 'right'", self.truncation_side
            )

    def stop_policy(self) -> StopPolicy:
        """Ends a sequence with its prompt: the token after it is not part of the answer."""
        return StopPolicy(max_tokens=1, ignore_eos=True)

    def truncated(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Returns a prompt truncated by `truncate_prompt_tokens` and `truncation_side`.

        Args:
            max_tokens: Maximum tokens that the model takes.

        Raises:
            InvalidParameterError: `truncate_prompt_tokens` is more than that.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit > max_tokens:
            raise InvalidParameterError("truncate_prompt_tokens", f"at most {max_tokens}", limit)
        limit = max_tokens if limit == -1 else limit
        return prompt[:limit] if self.truncation_side == "right" else prompt[-limit:]


def overridden(given: PoolerConfig | None, overrides: Any) -> PoolerConfig | None:
    """Returns a pooler config with the settings of `hf_overrides`, vLLM's way for rerankers.

    Raises:
        InvalidParameterError: An unrelated entry, or one that contradicts another.
    """
    if overrides is None:
        return given
    if not isinstance(overrides, Mapping):
        raise InvalidParameterError("hf_overrides", "a mapping", overrides)
    for name, value in overrides.items():
        field = f"hf_overrides.{name}"
        if name == "architectures":
            ok = isinstance(value, (list, tuple)) and all(
                str(v).endswith("ForSequenceClassification") for v in value
            )
            if not ok:
                raise InvalidParameterError(field, "a list of ...ForSequenceClassification", value)
        elif name == "is_original_qwen3_reranker":
            if value is not True:
                raise InvalidParameterError(field, "True", value)
        elif name == "method":
            if value not in _METHODS:
                raise InvalidParameterError(field, " or ".join(map(repr, _METHODS)), value)
        elif name != "classifier_from_token":
            known = "classifier_from_token, architectures, is_original_qwen3_reranker or method"
            raise InvalidParameterError("hf_overrides", known, name)
    if "classifier_from_token" not in overrides:
        raise InvalidParameterError("hf_overrides", "of a classifier_from_token", dict(overrides))
    own = PoolerConfig(classifier_from_token=overrides["classifier_from_token"])
    num_tokens = len(own.classifier_from_token or ())
    two = "is_original_qwen3_reranker" in overrides or overrides.get("method") == _METHODS[0]
    if num_tokens != (2 if two else 1) and (two or "method" in overrides):
        expected = "two tokens" if two else "one token"
        actual = overrides["classifier_from_token"]
        raise InvalidParameterError("hf_overrides.classifier_from_token", expected, actual)
    return own.over(given or PoolerConfig())


# vLLM's names for scores from the logits of two tokens, and of one.
_METHODS = ("from_2_way_softmax", "no_post_processing")


def runner_of(
    runner: str, directory: Path | None, given: PoolerConfig | None, *, classifies: bool = False
) -> str:
    """Returns the runner in effect. "auto" is "pooling" for models that classify or whose files say
    how they are pooled.

    Args:
        directory: Directory of the model's files; None if unknown.
        given: The caller's pooler config.
        classifies: True if the model has a classification layer.

    Raises:
        InvalidParameterError: It has one, and the options ask for text or for other pooling.
    """
    if classifies:
        if runner == "generate":
            expected = "'pooling' for a model that classifies texts"
            raise InvalidParameterError("runner", expected, runner)
        for name in ("pooling_type", "dimensions", "classifier_from_token"):
            value = getattr(given, name, None)
            if value not in (None, LAST):
                expected = "None for a model that classifies texts with its own layer"
                raise InvalidParameterError(f"pooler_config.{name}", expected, value)
        return "pooling"
    if runner != "auto":
        return runner
    scores = given is not None and given.classifier_from_token is not None
    return "pooling" if scores or _modules(directory) else "generate"


def pooler_config_of(
    given: PoolerConfig | None, directory: Path | None, config: Mapping[str, Any]
) -> PoolerConfig:
    """Returns the pooler config in effect: the caller's, else the model's, else the default.

    The model's comes from sentence-transformers' files: `modules.json` and the pooling module's
    config.

    Args:
        directory: Directory of the model's files; None if unknown.
        config: The model's ``config.json``.

    Raises:
        UnsupportedModelError: The model was not trained for pooled causal states.
    """
    model_type = str(config.get("model_type", ""))
    for name, values in _BIDIRECTIONAL:
        if config.get(name) in values:
            raise UnsupportedModelError(
                model_type,
                f"its config.json says {name}: {json.dumps(config[name])}, and embeddings are "
                "computed with causal attention only",
            )
    own = PoolerConfig()
    modules = _modules(directory)
    if modules:
        assert directory is not None
        own = _pooling_of(modules, directory, model_type, needs_type=_lacks_type(given))
    return (given or PoolerConfig()).over(own).over(_DEFAULT)


def prompts_of(directory: Path | None) -> dict[str, str]:
    """Returns the prompts of a sentence-transformers model, by the name of their use.

    Args:
        directory: Directory of the model's files; None if unknown.
    """
    found = None if directory is None else _read(directory / "config_sentence_transformers.json")
    prompts = found.get("prompts") if isinstance(found, Mapping) else None
    if not isinstance(prompts, Mapping):
        return {}
    return {str(name): text for name, text in prompts.items() if isinstance(text, str)}


def _lacks_type(given: PoolerConfig | None) -> bool:
    return given is None or given.pooling_type is None


def _modules(directory: Path | None) -> list[Mapping[str, Any]]:
    """Returns the entries of a `modules.json` that has a pooling module; otherwise none."""
    found = None if directory is None else _read(directory / "modules.json")
    if not isinstance(found, list) or not all(isinstance(module, Mapping) for module in found):
        return []
    return found if any(_kind(module) == _POOLING for module in found) else []


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _pooling_of(
    modules: list[Mapping[str, Any]], directory: Path, model_type: str, *, needs_type: bool
) -> PoolerConfig:
    kinds = [_kind(module) for module in modules]
    for kind in kinds:
        if kind not in (_TRANSFORMER, _POOLING, _NORMALIZE):
            raise UnsupportedModelError(
                model_type, f"its modules.json has a module {kind!r}, which is not supported"
            )
    path = str(modules[kinds.index(_POOLING)].get("path", ""))
    pooling = _read(directory / path / "config.json")
    if not isinstance(pooling, Mapping):
        pooling = {}
    mode = pooling.get("pooling_mode")
    flags = [n.removeprefix("pooling_mode_") for n, on in pooling.items() if on is True
             and n.startswith("pooling_mode_")]  # fmt: skip
    modes = [mode] if isinstance(mode, str) else flags
    chosen = _MODES.get(modes[0]) if len(modes) == 1 else None
    if needs_type and chosen is None:
        raise UnsupportedModelError(
            model_type,
            f"its {path}/config.json asks for pooling by {modes or 'nothing known'}; "
            "pooler_config.pooling_type LAST or MEAN chooses another",
        )
    return PoolerConfig(pooling_type=chosen, normalize=_NORMALIZE in kinds)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _check_dimensions(field: str, value: object) -> None:
    if value is not None and (not _is_integer(value) or int(value) < 1):  # type: ignore[call-overload]
        raise InvalidParameterError(field, "None or an integer of at least 1", value)


def check_dimensions_fit(field: str, dimensions: int | None, hidden_size: int) -> None:
    """Refuses more dimensions than the model's hidden states have.

    Raises:
        InvalidParameterError: It names the field.
    """
    if dimensions is not None and dimensions > hidden_size:
        expected = f"at most {hidden_size}, the size of this model's hidden states,"
        raise InvalidParameterError(field, expected, dimensions)


def _check_boolean(field: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidParameterError(field, "None, True or False", value)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_DEFAULT = PoolerConfig(pooling_type=LAST, normalize=True)
