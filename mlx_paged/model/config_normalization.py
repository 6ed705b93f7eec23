"""Rewrites a `config.json` so that all spellings of a model read the same. Imports no mlx.

transformers 4 stores `rope_theta` and `rope_scaling`; transformers 5 stores one `rope_parameters`,
per layer type for some families. Both omit fields with their config class's default, which may
differ from the default of the library that runs the model. `normalize` adds missing fields with
transformers' defaults and writes RoPE in every spelling, also in nested text configs.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from mlx_paged.model.config_files import LENGTH_FIELDS

logger = logging.getLogger(__name__)

#: The layer type whose RoPE the flat fields describe, if a config has one per layer type.
_MAIN = ("full_attention", "attention", "main")
_LOCAL = ("sliding_attention", "chunked_attention")
# Fields of `rope_parameters` that have their own flat field.
_FLAT = frozenset({"rope_theta", "partial_rotary_factor"})
# Flat names that older configs use for one field.
_THETA = ("rope_theta", "rotary_emb_base")
_ROTATED = ("partial_rotary_factor", "rotary_pct")
_LOCAL_THETA = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")
_SCALED_BY_LENGTH = ("llama3", "yarn", "longrope")


def normalize(config: Mapping[str, Any], *, fill: bool = True) -> dict[str, Any]:
    """Returns a config with transformers' defaults filled in and RoPE in every spelling.

    The config's own fields stay, except RoPE fields that contradict `rope_parameters`. Token ids
    and context lengths are never filled in, because their defaults would end answers.

    Args:
        fill: Add missing fields; False only rewrites RoPE.

    Returns:
        A new dict. Each section with RoPE (the config itself, and nested text configs) has
        ``rope_theta``, ``partial_rotary_factor`` (if there is one), ``rope_scaling`` (None for
        plain RoPE; with both ``type`` and ``rope_type``) and ``rope_parameters``. If
        ``rope_parameters`` has one entry per layer type, the flat fields are those of full
        attention, and ``rope_local_base_freq`` is the base of layers with a window.
    """
    found = deepcopy(dict(config))
    reference = reference_of(found)
    if reference is not None and fill:
        _fill(found, reference)
    _spell_rope(found, reference)
    for name, section in found.items():
        if isinstance(section, Mapping) and _is_section(section):
            inner = getattr(reference, name, None)
            if inner is not None and not isinstance(inner, Mapping):
                _spell_sections(section, inner)  # type: ignore[arg-type]
            else:
                found[name] = normalize(section, fill=fill)
    return found


def _is_section(section: Mapping[str, Any]) -> bool:
    return "model_type" in section or any(name in section for name in _SECTION_FIELDS)


_SECTION_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters")


def _spell_sections(section: dict[str, Any], reference: Any) -> None:
    _spell_rope(section, reference)
    for name, inner in section.items():
        if isinstance(inner, dict) and _is_section(inner):
            _spell_sections(inner, getattr(reference, name, None))


# --- transformers' defaults -----------------------------------------------------------------------


def reference_of(config: Mapping[str, Any]) -> Any:
    """Returns transformers' own reading of a config; None if it does not know or accept it."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    ours = _ARCHITECTURES.get(model_type)
    if ours is not None and not set(ours) & set(config.get("architectures") or ()):
        return None
    given = deepcopy(dict(config))
    if given.get("rope_scaling") is None:
        given.pop("rope_scaling", None)  # Some classes read it as `rope_parameters`.
    try:
        with _quiet():
            return CONFIG_MAPPING[model_type].from_dict(given)
    except Exception as error:  # Config classes may raise anything.
        logger.info(
            "transformers cannot read this config.json (%s: %s), so fields that it leaves out have "
            "mlx-lm's defaults",
            type(error).__name__,
            str(error).strip().split("\n")[0],
        )
        return None


# Model types that transformers and code in checkpoints use for different models. Here they mean
# transformers' models.
_ARCHITECTURES = {"bailing_hybrid": ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops transformers' remarks about fields: only a config's author can act on them."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _fill(section: dict[str, Any], reference: Any) -> None:
    """Adds fields of transformers' reading that the section omits, also in nested sections."""
    from transformers import PreTrainedConfig

    ours = {**dict.fromkeys(reference.attribute_map), **reference.__dict__}
    for name in ours:
        if name.startswith("_") or "token_id" in name or name in _NOT_FILLED:
            continue
        value = _field(reference, name)
        if isinstance(value, PreTrainedConfig):
            inner = section.get(name)
            # A text model's own fields may replace the section of a multimodal config.
            if inner is None and "num_hidden_layers" not in section:
                inner = section[name] = {"model_type": value.model_type}
            if isinstance(inner, dict):
                _fill(inner, value)
        elif section.get(name) is None and _is_plain(value):
            section[name] = deepcopy(value)


def _field(reference: Any, name: str) -> Any:
    try:
        return getattr(reference, name, None)
    except Exception:  # Gemma 4's layers have different head sizes, so it has no single one.
        return None


# Fields of every config class without effect on the model's computation, and RoPE's, which
# `_spell_rope` writes.
_NOT_FILLED = frozenset({
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "architectures",
    "dtype", "torch_dtype", "transformers_version", "quantization_config", "id2label", "label2id",
    "name_or_path", "return_dict", "output_hidden_states", "output_attentions", "use_cache",
    "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", *LENGTH_FIELDS,
})  # fmt: skip


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, (bool, int, float, str))


# --- RoPE -----------------------------------------------------------------------------------------


def _spell_rope(section: dict[str, Any], reference: Any) -> None:
    """Writes a section's RoPE as `rope_parameters` and in flat fields."""
    given = _rope_parameters(section, reference)
    if not given:
        return
    # A file that has flat fields keeps them (some hold a list, a value per layer).
    overrides = bool(section.get("rope_parameters"))

    def write(name: str, value: Any) -> None:
        if overrides or section.get(name) is None:
            section[name] = value

    if _is_nested(given):
        complete: dict[str, dict[str, Any] | None] = {
            kind: None if value is None else _complete(section, value)
            for kind, value in given.items()
        }
        if any("partial_rotary_factor" in (value or ()) for value in complete.values()):
            # Meant for one kind of layers; mlx-lm would apply it to others.
            for value in complete.values():
                if value is not None and reference is not None:
                    value.setdefault("partial_rotary_factor", 1.0)
        section["rope_parameters"] = complete
        kinds = section.get("layer_types") or ()
        rotated = [(complete.get(kind) or {}).get("partial_rotary_factor") for kind in kinds]
        if rotated and None not in rotated:
            write("partial_rotary_factors", rotated)
    else:
        flat = _complete(section, given)
        complete = {_MAIN[0]: flat}
        section["rope_parameters"] = dict(flat)
    main, local = _first(complete, _MAIN), _first(complete, _LOCAL)
    if main is None:
        main = next((value for value in complete.values() if value is not None), {})
    if reference is not None and main and "partial_rotary_factor" not in main:
        write("partial_rotary_factor", 1.0)  # Families of mlx-lm have other defaults.
        write("rotary_pct", 1.0)
    for names, field, parameters in (
        (_THETA, "rope_theta", main),
        (_ROTATED, "partial_rotary_factor", main),
        (_LOCAL_THETA, "rope_theta", local or {}),
    ):
        for name in names:
            if parameters.get(field) is not None:
                write(name, parameters[field])
    scaling = {name: value for name, value in main.items() if name not in _FLAT}
    is_plain = scaling.keys() <= {"type", "rope_type"} and main.get("rope_type") == "default"
    section["rope_scaling"] = None if is_plain or not scaling else scaling


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    """True for one mapping per layer type (None for one without RoPE)."""
    return any(isinstance(value, Mapping) for value in parameters.values())


def _first(parameters: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[str, Any] | None:
    return next((parameters[kind] for kind in kinds if parameters.get(kind)), None)


def _rope_parameters(section: Mapping[str, Any], reference: Any) -> dict[str, Any]:
    """RoPE of a section, as `rope_parameters`: flat, or one mapping (or None) per layer type."""
    read = deepcopy(dict(getattr(reference, "rope_parameters", None) or {}))
    given = section.get("rope_parameters")
    if isinstance(given, Mapping) and given:
        found = read or deepcopy(dict(given))
        if not _is_nested(found):
            _default(found, section)
        return found
    # transformers 5 ignores flat fields for families whose `rope_parameters` have a default.
    flat: dict[str, Any] = {}
    if isinstance(section.get("rope_scaling"), Mapping):
        flat = deepcopy(dict(section["rope_scaling"]))
    _default(flat, section)
    if not _is_nested(read):
        is_flat = flat or "rope_scaling" in section
        return {**{n: v for n, v in read.items() if n in _FLAT or not is_flat}, **flat}
    main = next((kind for kind in _MAIN if kind in read), None)
    local = next((kind for kind in _LOCAL if kind in read), None)
    if main is not None:
        read[main] = {**(read[main] or {}), **flat}
    if local is not None:
        base = _number(section, _LOCAL_THETA)
        if base is None and not isinstance(getattr(reference, "default_theta", None), Mapping):
            base = flat.get("rope_theta")  # one base for all layers
        if base is not None:
            read[local] = {**(read[local] or {}), "rope_theta": base}
        if "partial_rotary_factor" in flat:
            read[local]["partial_rotary_factor"] = flat["partial_rotary_factor"]
    return read


def _default(parameters: dict[str, Any], section: Mapping[str, Any]) -> None:
    """Adds the base and the rotated part, if the section has them in flat fields."""
    for field, names in (("rope_theta", _THETA), ("partial_rotary_factor", _ROTATED)):
        value = _number(section, names)
        if value is not None:
            parameters.setdefault(field, value)


def _number(section: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((section[n] for n in names if isinstance(section.get(n), (int, float))), None)


def _complete(section: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters with their type under both names, and the length that scaling began
    at."""
    found = dict(parameters)
    # Both exist, and differ, if "mrope" was changed to "default" later.
    old = "longrope" if found.get("type") == "su" else found.get("type")
    rope_type = found.get("rope_type") or old or "default"
    found["rope_type"] = rope_type
    found["type"] = old if old == "mrope" else rope_type
    if rope_type in _SCALED_BY_LENGTH:
        name = "original_max_position_embeddings"
        original = found.get(name) or section.get(name) or section.get("max_position_embeddings")
        if original is not None:
            found[name] = original
    return found
