"""Collects the models of `mlx-paged serve`: its argument, --model, and --models-config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from mlx_paged.cli.options import option_values
from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.several_options import SeveralOptions
from mlx_paged.errors import InvalidParameterError

_KEYS = ("model", "name", "aliases", "pinned", "preload", "ttl", "options")
_FILE = "models_config"


@dataclass(frozen=True)
class ServedModelOptions:
    """One model of a server.

    Attributes:
        model: Directory, GGUF file or hub id; None: the embedded model.
        names: The name in answers, then aliases; empty: named after its path.
        options: Its options.
        pinned, preload, ttl: See `ModelSpec`.
    """

    model: str | None
    options: ModelOptions
    names: tuple[str, ...] = ()
    pinned: bool = False
    preload: bool = False
    ttl: float | None = None


def models_of(
    context: typer.Context, model: str | None, options: ModelOptions, several: SeveralOptions
) -> list[ServedModelOptions]:
    """Returns the models in the order of the command line; there is at least one.

    Args:
        model: The argument of `serve`.
        options: Defaults of all models.

    Raises:
        InvalidParameterError: It names the option, and the entry of the file.
    """
    ttl = several.model_ttl
    found: list[ServedModelOptions] = []
    for text in several.models or ():
        name, path = _name_and_path(text)
        found.append(ServedModelOptions(path, options, (name,) if name else (), ttl=ttl))
    if several.models_config is not None:
        found += _of_file(context, several.models_config, options, ttl)
    if model is not None or not found:
        names = tuple(options.served_model_names or ())
        found.insert(0, ServedModelOptions(model, options, names, ttl=ttl))
    return found


def refuse_alone(several: SeveralOptions) -> None:
    """Rejects options that have no meaning for a single model.

    Raises:
        InvalidParameterError: It names the option.
    """
    for name in ("memory_budget", "model_ttl", "pin_models", "preload_models", "spare_process"):
        given = getattr(several, name)
        if given is not None:
            raise InvalidParameterError(name, "given with several models (--model)", given)


def _name_and_path(text: str) -> tuple[str, str]:
    """Splits NAME=PATH, unless it is an existing path that contains an equals sign."""
    name, sign, path = text.partition("=")
    if not sign or Path(text).exists():
        return "", text
    if not name or not path:
        raise InvalidParameterError("models", "PATH or NAME=PATH", text)
    return name, path


def _of_file(
    context: typer.Context, path: Path, options: ModelOptions, ttl: float | None
) -> Iterator[ServedModelOptions]:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidParameterError(_FILE, f"a YAML file ({error})", str(path)) from error
    if isinstance(entries, Mapping) and entries.keys() == {"models"}:
        entries = entries["models"]
    if not isinstance(entries, list) or not entries:
        raise InvalidParameterError(_FILE, "a list of models", _shown(entries))
    for index, entry in enumerate(entries):
        yield _entry(context, f"{_FILE}[{index}]", entry, options, ttl)


def _entry(
    context: typer.Context, where: str, entry: Any, options: ModelOptions, ttl: float | None
) -> ServedModelOptions:
    if isinstance(entry, str):
        entry = {"model": entry}
    if not isinstance(entry, Mapping):
        raise InvalidParameterError(where, "a path, or a mapping", _shown(entry))
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise InvalidParameterError(where, f"a mapping of {', '.join(_KEYS)}", _shown(unknown[0]))
    _check(where, entry, "model", str, "a path or a hub id")
    _check(where, entry, "name", str, "a string")
    for key in ("pinned", "preload"):
        _check(where, entry, key, bool, "true or false")
    ttl = entry.get("ttl", ttl)
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or ttl < 0):
        raise InvalidParameterError(f"{where}.ttl", "seconds, at least 0", _shown(ttl))
    aliases = entry.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise InvalidParameterError(f"{where}.aliases", "a list of names", _shown(aliases))
    own = entry.get("options") or {}
    if not isinstance(own, Mapping):
        raise InvalidParameterError(f"{where}.options", "a mapping", _shown(own))
    names = tuple(field.name for field in fields(ModelOptions))
    if "served_model_names" in (values := option_values(context, f"{where}.options", own, names)):
        raise InvalidParameterError(
            f"{where}.options", "without names, which `name` sets", "served_model_names"
        )
    name = entry.get("name")
    if aliases and name is None:
        raise InvalidParameterError(f"{where}.name", "given with aliases", None)
    return ServedModelOptions(
        entry.get("model"),
        replace(options, served_model_names=None, **values),
        () if name is None else (name, *aliases),
        entry.get("pinned", False),
        entry.get("preload", False),
        ttl,
    )


def _check(where: str, entry: Mapping[str, Any], key: str, kind: type, expected: str) -> None:
    if key in entry and not isinstance(entry[key], kind):
        raise InvalidParameterError(f"{where}.{key}", expected, _shown(entry[key]))


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 64 else f"{text[:64]}..."
