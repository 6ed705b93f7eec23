"""Makes a model of mlx-lm from a GGUF file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_paged import extension  # noqa: F401  checks the extension, and loads BLAS, before mlx

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from mlx_paged.errors import ModelLoadError, UnsupportedModelError
from mlx_paged.gguf.checkpoint import Checkpoint
from mlx_paged.model.deviations import conform
from mlx_paged.model.families import require_family
from mlx_paged.model.mlx_lm_config import mlx_lm_config
from mlx_paged.platform import is_cpu_default

logger = logging.getLogger(__name__)

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_gguf(name: str, dtype: str = "auto") -> tuple[Checkpoint, nn.Module, dict[str, Any], Any]:
    """Loads a file: returns its contents, the model, its config and its tokenizer.

    Args:
        dtype: "auto" casts the values for a GPU. With another dtype every value keeps its own, as
            on the CPU, and the caller casts them.

    Raises:
        ModelLoadError: The file is damaged or not supported; the message is one line.
        UnsupportedModelError: The family of mlx-lm is not verified with the paged cache.
    """
    with _reasons(name):
        checkpoint = Checkpoint(name)
        require_family(mlx_lm_config(checkpoint.config))
        model, config = make_model(checkpoint)
        if dtype == "auto" and not is_cpu_default():
            _cast(model, _DTYPES[config["torch_dtype"]], name)
        mx.eval(model.parameters())
        return checkpoint, model, config, checkpoint.tokenizer()


def load_gguf_tokenizer(name: str) -> Any:
    """Returns a file's tokenizer, as mlx-lm wraps it.

    Raises:
        ModelLoadError: The file is damaged or not supported.
    """
    with _reasons(name):
        return Checkpoint(name).tokenizer()


@contextlib.contextmanager
def _reasons(name: str) -> Iterator[None]:
    """Turns errors while a file is read into one that names it."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelLoadError(name, _one_line(error)) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        # Invalid metadata may fail anywhere in mlx-lm's code.
        reason = f"its metadata describes no model ({type(error).__name__}: {_one_line(error)})"
        raise ModelLoadError(name, reason) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def make_model(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
    """Makes the model of a checkpoint; its weights keep their dtypes.

    Returns:
        The model and its config for mlx-lm.

    Raises:
        GGUFError: Weights are missing, unknown, or have other shapes.
    """
    config = mlx_lm_config(checkpoint.config)
    model_class, args_class = _get_classes(config=config)
    model = model_class(args_class.from_dict(config))
    if checkpoint.has_choice_bias and config["model_type"] == "ernie4_5_moe":
        _add_choice_bias(model)
    shapes = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    quantizable = {
        path for path, module in model.named_modules() if hasattr(module, "to_quantized")
    }
    weights = checkpoint.weights(shapes, quantizable)
    if weights.formats:
        nn.quantize(model, class_predicate=lambda path, _: weights.formats.get(path, False))
        first = next(iter(weights.formats.values()))
        config["quantization"] = {**first, **weights.formats}
    model.eval()
    model.load_weights(list(weights.arrays.items()), strict=True)
    conform(model, config, checkpoint.config)
    return model, config


def _add_choice_bias(model: nn.Module) -> None:
    """Adds the bias for choosing experts, which mlx-lm's module drops and `conform` uses."""
    for layer in model.layers:
        if hasattr(layer.mlp, "switch_mlp"):
            layer.mlp.choice_bias = mx.zeros(layer.mlp.gate.weight.shape[0])


def _cast(model: nn.Module, dtype: mx.Dtype, name: str) -> None:
    """Gives all values the dtype of activations, as products on a GPU need it."""
    is_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    cast, scales = {}, []
    for path, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and is_cast(path):
            cast[path] = array.astype(dtype)
            if path.endswith(".scales") and array.dtype != dtype:
                scales.append((array.astype(mx.float32), cast[path].astype(mx.float32)))
    if scales:
        error = sum(mx.square(before - after).sum() for before, after in scales)
        whole = sum(mx.square(before).sum() for before, _ in scales)
        logger.warning(
            "%s: scales of %d matrices are rounded to %s, with a relative error of %.2g%% (root "
            "mean square); --dtype float32 keeps them, and takes more memory",
            Path(name).name,
            len(scales),
            str(dtype).rpartition(".")[2],
            100 * mx.sqrt(error / mx.maximum(whole, 1e-30)).item(),
        )
    model.load_weights(list(cast.items()), strict=False)
