"""StructuredOutputs: the constraint on an answer, with the checks that need no model."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlx_paged.engine.checks import is_text
from mlx_paged.errors import InvalidParameterError

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
#: Kinds that contain JSON, so that JSON options apply.
_WITH_JSON = ("json", "json_object", "structural_tag")
_FIELD = "structured_outputs"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The constraint on an answer: exactly one of the first six fields. Names and meanings are
    vLLM's (`StructuredOutputsParams`); `strict` and `enable_in_reasoning` are ours.

    Args:
        json: A JSON schema: a mapping, its JSON text, True (any value), or a pydantic model class.
            Stored as plain Python data.
        regex: A regular expression (Rust's syntax) for the whole answer.
        choice: The answer is one of these texts.
        grammar: A context-free grammar in Lark's syntax (llguidance's dialect) or in GBNF. In Lark,
            the tokenizer's added tokens are written ``<name>`` or ``<[id]>``.
        json_object: Any JSON object.
        structural_tag: Text in which constrained parts begin at triggers: a mapping or its JSON
            text, ``{"structures": [{"begin", "schema", "end"}], "triggers"}`` or
            ``{"type": "structural_tag", "format": ...}``.
        disable_any_whitespace: No whitespace in JSON outside of strings.
        disable_additional_properties: Objects that list properties have no others, unless their
            schema says so.
        whitespace_pattern: A regular expression for whitespace in JSON; None allows a line break
            with indentation, or a few spaces.
        strict: Refuse keywords of a schema that cannot be enforced. Otherwise they are relaxed and
            listed in `CompiledGrammar.relaxed`.
        enable_in_reasoning: Apply the constraint from the first token on, including reasoning.
            Otherwise it applies after the reasoning.

    Raises:
        InvalidParameterError: An invalid value; the error names the field.
    """

    # A mapping has no hash, but it takes part in equality.
    json: Mapping[str, Any] | str | bool | type | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = field(default=None, hash=False)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    strict: bool = False
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.json_object is not None:
            _check("json_object", isinstance(self.json_object, bool), "a boolean", self.json_object)
            if not self.json_object:
                object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            expected = f"exactly one of {', '.join(_KINDS)}"
            raise InvalidParameterError(_FIELD, expected, " and ".join(given) or "none of them")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                _check(name, is_text(value) and value != "", "a text, not empty", value)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice_of(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_of("json", self.json))
        if self.structural_tag is not None:
            tag = _data_of("structural_tag", self.structural_tag, "a mapping, or its JSON text")
            _check("structural_tag", isinstance(tag, dict), "a mapping, or its JSON text", tag)
            object.__setattr__(self, "structural_tag", tag)
        for name in (
            "disable_any_whitespace",
            "disable_additional_properties",
            "strict",
            "enable_in_reasoning",
        ):
            value = getattr(self, name)
            _check(name, isinstance(value, bool), "a boolean", value)
        self._check_options(given[0])

    def _check_options(self, kind: str) -> None:
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            value = getattr(self, name)
            if value:
                expected = f"left out: {kind} contains no JSON"
                _check(name, kind in _WITH_JSON, expected, value)
        if self.disable_additional_properties:
            expected = f"left out: {kind} has no schema"
            _check(
                "disable_additional_properties", kind in ("json", "structural_tag"), expected, True
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidParameterError(
                f"{_FIELD}.whitespace_pattern",
                "None where disable_any_whitespace is set",
                self.whitespace_pattern,
            )

    @property
    def kind(self) -> str:
        """The name of the given field."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def json_schema(self) -> dict[str, Any] | bool | None:
        """The schema of `json` as plain Python data; None for other kinds."""
        return self.json  # type: ignore[return-value]

    @property
    def canonical_text(self) -> str:
        """A text that is equal for equal constraints, and different otherwise.

        The order of a schema's properties matters, because the answer follows it.
        """
        values = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "enable_in_reasoning" and getattr(self, f.name) != f.default
        }
        return json_module.dumps(values, ensure_ascii=False, separators=(",", ":"))


def structured_outputs_of(given: Any) -> StructuredOutputs | None:
    """Returns `StructuredOutputs` from itself, a mapping of its fields, or None.

    Raises:
        InvalidParameterError: Something else, an unknown name, or an invalid value.
    """
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        expected = "None, StructuredOutputs, or a mapping of its fields"
        raise InvalidParameterError(_FIELD, expected, given)
    known = [f.name for f in fields(StructuredOutputs)]
    for name in given:
        if name not in known:
            raise InvalidParameterError(
                f"{_FIELD}.{name}", f"left out: the fields are {', '.join(known)}", given[name]
            )
    return StructuredOutputs(**given)


def _check(name: str, ok: bool, expected: str, value: object) -> None:
    if not ok:
        raise InvalidParameterError(f"{_FIELD}.{name}", expected, value)


def _choice_of(given: Any) -> tuple[str, ...]:
    expected = "at least one text, none of them empty"
    is_several = isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray))
    _check("choice", is_several and len(given) > 0, expected, given)
    for i, text in enumerate(given):
        _check(f"choice[{i}]", is_text(text) and text != "", "a text, not empty", text)
    return tuple(dict.fromkeys(given))


def _schema_of(name: str, given: Any) -> dict[str, Any] | bool:
    expected = "a JSON schema: a mapping, its JSON text, True, or a pydantic model class"
    for method in ("model_json_schema", "json_schema"):  # of a model class, of a TypeAdapter
        make = None if isinstance(given, Mapping) else getattr(given, method, None)
        if callable(make):
            try:
                given = make()
            except Exception as error:  # of the caller's class
                message = f"{expected}; its {method} raised {type(error).__name__}: {error}"
                raise InvalidParameterError(f"{_FIELD}.{name}", message, given) from error
            break
    schema = _data_of(name, given, expected)
    _check(name, isinstance(schema, (dict, bool)), expected, given)
    _check(name, schema is not False, f"{expected} (no value is valid for False)", given)
    return schema  # type: ignore[no-any-return]


def _data_of(name: str, given: Any, expected: str) -> Any:
    """Returns plain Python data from JSON text, or a copy of data that could be JSON."""
    if isinstance(given, (str, bytes)):
        text, expected = given, f"{expected} (this text is not JSON)"
    else:
        _check(name, isinstance(given, (Mapping, bool)), expected, given)
        try:
            text = json_module.dumps(given, allow_nan=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{expected} (not JSON: {error})"
            raise InvalidParameterError(f"{_FIELD}.{name}", message, given) from error
    try:
        data = json_module.loads(text, parse_constant=_refuse_constant)
        # Lone surrogates have no UTF-8 encoding.
        json_module.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"{_FIELD}.{name}", f"{expected}: {error}", given) from error
    return data


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
