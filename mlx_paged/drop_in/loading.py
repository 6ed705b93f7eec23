"""Replaces mlx-lm's `load_model`, so that it reads RoPE of checkpoints that transformers 5 saved.

These have one field `rope_parameters` where transformers 4 wrote `rope_theta` and `rope_scaling`.
Most modules of mlx-lm do not read it: they take their own default for the base, or fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `mlx_lm.utils.load_model`: RoPE turns as the file says; all else is mlx-lm's."""
    signature = inspect.signature(original)

    @wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        from mlx_lm.utils import load_config

        from mlx_paged.model.config_normalization import normalize
        from mlx_paged.model.deviations import conform_positions

        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("model_config") or {}
        path = Path(call.arguments["model_path"])
        # (A caller who gives the field, as mlx_paged's own loader does, has written the others.)
        if "rope_parameters" in given or not (path / "config.json").is_file():
            return original(*args, **kwargs)
        file = load_config(path)
        if not _is_new(file):
            return original(*args, **kwargs)
        written = normalize({**file, **given}, fill=False)
        changes = {name: value for name, value in written.items() if file.get(name) != value}
        call.arguments["model_config"] = {**given, **changes}
        model, config = original(*call.args, **call.kwargs)
        conform_positions(model, written, file)
        return model, config

    return load_model


def _is_new(config: Mapping[str, Any]) -> bool:
    """True for a config, or a section of one, that has `rope_parameters`."""
    return bool(config.get("rope_parameters")) or any(
        isinstance(section, Mapping) and section.get("rope_parameters")
        for section in config.values()
    )
