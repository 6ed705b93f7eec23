"""Makes a model of mlx-lm from a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_gguf(name: str) -> tuple[Checkpoint, nn.Module, dict[str, Any], Any]:
    """Loads a file: returns its contents, the model, its config and its tokenizer.

    Raises:
        ModelLoadError: The file is damaged or not supported; the message is one line.
        UnsupportedModelError: The family of mlx-lm is not verified with the paged cache.
    """
    with _reasons(name):
        checkpoint = Checkpoint(name)
        require_family(checkpoint.config)
        model, config = make_model(checkpoint)
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
        # Metadata without sense may fail anywhere in mlx-lm's code.
        reason = f"its metadata describes no model ({type(error).__name__}: {_one_line(error)})"
        raise ModelLoadError(name, reason) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def make_model(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model with its weights, and its config.

    On a GPU, all values take the dtype of the config. On the CPU each keeps its own.

    Raises:
        GGUFError: Weights are missing, unknown, or have other shapes.
    """
    config = mlx_lm_config(checkpoint.config)
    model_class, args_class = _get_classes(config=config)
    model = model_class(args_class.from_dict(config))
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
    if not is_cpu_default():
        is_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
        cast = {
            name: array.astype(_DTYPES[config["torch_dtype"]])
            for name, array in tree_flatten(model.parameters())
            if mx.issubdtype(array.dtype, mx.floating) and is_cast(name)
        }
        model.load_weights(list(cast.items()), strict=False)
    mx.eval(model.parameters())
    return model, config
