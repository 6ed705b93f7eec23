"""Options that can also be set in the environment, and in a YAML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

ENV_PREFIX = "MLX_PAGED"


def option(panel: str, *names: str, help: str, **more: Any) -> Any:
    """An option in a group of ``--help``; its environment variable follows from its name."""
    flag = names[0].partition("/")[0]
    variable = f"{ENV_PREFIX}_{flag.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(
        *names, help=help, rich_help_panel=panel, envvar=variable, show_envvar=False, **more
    )


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes a YAML file's entries the defaults; the command line and the environment win."""
    if path is None:
        return None
    import yaml

    try:
        entries = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise typer.BadParameter(f"{path} must hold options as `name: value`")
    parameters = _by_name(context.command)
    defaults: dict[str, Any] = {}
    for key, value in entries.items():
        option, is_negated = parameters.get(str(key).replace("-", "_"), (None, False))
        if option is None or option.name == "config":
            raise typer.BadParameter(f"{path}: there is no option {key!r}")
        if is_negated:
            if not isinstance(value, bool):
                raise typer.BadParameter(f"{path}: {key} must be true or false but is {value!r}")
            defaults[option.name] = not value
        elif isinstance(value, dict):
            defaults[option.name] = json.dumps(value)  # what the command line takes as JSON
        elif isinstance(value, (list, tuple)):
            defaults[option.name] = [str(v) for v in value]
        else:
            several = getattr(option, "multiple", False)
            defaults[option.name] = [str(value)] if several else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _by_name(command: Any) -> dict[str, tuple[Any, bool]]:
    """A command's parameters by each of their names, and whether that name turns them off."""
    found: dict[str, tuple[Any, bool]] = {}
    for parameter in command.params:
        for names, is_negated in ((parameter.opts, False), (parameter.secondary_opts, True)):
            for name in names:
                found[name.lstrip("-").replace("-", "_")] = parameter, is_negated
        found[parameter.name] = parameter, False
    return found
