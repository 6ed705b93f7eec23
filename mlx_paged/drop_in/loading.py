"""Replacement for mlx-lm's `load_model` that reads RoPE settings written by transformers 5.

Such checkpoints have a `rope_parameters` field in place of `rope_theta` and `rope_scaling`. Most
mlx-lm modules do not read it: they use a default base, or fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any


def load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `mlx_lm.utils.load_model`: applies the RoPE settings of the file."""
    signature = inspect.signature(original)

    @wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        from mlx_lm.utils import load_config

        from mlx_paged.model.config_normalization import normalize
        from mlx_paged.model.deviations import conform_positions

        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("model_config") or {}
        path = Path(call.arguments["model_path"])
        # A caller that passes the field, like mlx_paged's own loader, has normalized the config.
        if "rope_parameters" in given or not (path / "config.json").is_file():
            return original(*args, **kwargs)
        file = load_config(path)
        if not _is_new(file):
            return original(*args, **kwargs)
        written = normalize({**file, **given}, fill=False)
        changes = {name: value for name, value in written.items() if file.get(name) != value}
        call.arguments["model_config"] = {**given, **changes}
        model, config = original(*call.args, **call.kwargs)
        # A caller's own class (`get_model_classes`) reads its config itself.
        if type(model).__module__.startswith("mlx_lm."):
            conform_positions(model, written, file)
        return model, config

    return load_model


def _is_new(config: Mapping[str, Any]) -> bool:
    """True if the config or one of its sections has `rope_parameters`."""
    return bool(config.get("rope_parameters")) or any(
        isinstance(section, Mapping) and section.get("rope_parameters")
        for section in config.values()
    )
