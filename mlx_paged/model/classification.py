"""ClassificationHead: the last layer of a model that classifies texts, transformers' `score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Activation = Literal["softmax", "sigmoid", "none"]

#: Its weights have names that begin with this.
PREFIX = "score."
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}


@dataclass(frozen=True, eq=False)
class ClassificationHead:
    """A linear layer over the last token's state, and the activation of its outputs.

    Attributes:
        weights: ``[num_classes, hidden_size]`` float64.
        bias: ``[num_classes]`` float64.
        activation: Makes probabilities of the outputs.
        labels: Names of the classes.
    """

    weights: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]
    activation: Activation
    labels: tuple[str, ...]


def load_head(
    path: Path, config: Mapping[str, Any], names: Sequence[str]
) -> ClassificationHead | None:
    """Returns the classification head of a checkpoint; None if it has no such layer.

    Args:
        path: Its directory.
        config: Its ``config.json``.
        names: Names of all its weights.

    Raises:
        ValueError: The weights have another form, or do not fit the labels.
    """
    architectures = config.get("architectures") or ()
    if f"{PREFIX}weight" not in names or not any(
        str(name).endswith("ForSequenceClassification") for name in architectures
    ):
        return None
    found: dict[str, npt.NDArray[np.float64]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():  # type: ignore[union-attr]
            if name.startswith(PREFIX):
                found[name] = np.array(array.astype(mx.float32)).astype(np.float64)
    weights = found.pop(f"{PREFIX}weight")
    bias = found.pop(f"{PREFIX}bias", np.zeros(weights.shape[0]))
    if found:
        raise ValueError(f"its classification layer has weights {sorted(found)}, not understood")
    given = config.get("id2label") or {}
    labels = tuple(str(given.get(str(i), f"LABEL_{i}")) for i in range(weights.shape[0]))
    if given and len(given) != len(labels):
        raise ValueError(f"id2label has {len(given)} labels, but score.weight {len(labels)} rows")
    kind = str(config.get("problem_type"))
    activation = _ACTIVATIONS.get(kind, "softmax")
    if len(labels) == 1 and activation == "softmax":
        activation = "sigmoid"
    return ClassificationHead(weights, bias, activation, labels)


def without_head(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns the weights of the rest of the model."""
    return {name: weight for name, weight in weights.items() if not name.startswith(PREFIX)}
