"""PEFT's updates of the parameters that hold all experts of a layer, ``target_parameters``.

transformers has the experts of a layer in two parameters, ``gate_up_proj`` (or ``up_proj``) and
``down_proj``, of one module. PEFT's files name the module, and ``base_layer`` for the inner one of
two wrappers, but not the parameter, which follows from the shapes:

====  ================  ==========================================
half  shape             order
====  ================  ==========================================
A     [E * r, inputs]   all ranks of an expert follow each other
B     [outputs, r * E]  all experts of a rank follow each other
====  ================  ==========================================

Older versions of PEFT take outputs for inputs, where transformers stores ``[E, outputs, inputs]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mlx_paged.model.lora_slots import LowRank

if TYPE_CHECKING:
    from mlx_paged.engine.lora.readers import Reader

_MODULE = re.compile(r"(?P<module>(?:.*\.)?(?P<layer>layers\.\d+)\..*experts)(?:\.base_layer)*")


def of_parameter(
    reader: Reader, layer: str, pair: Mapping[str, np.ndarray]
) -> dict[str, LowRank] | None:
    """Returns the updates of a model's layers of experts, by path.

    Args:
        layer: The name of a module in a file.
        pair: Its halves.

    Returns:
        None if the name is not that of a module with experts.

    Raises:
        AdapterError: The model has no such experts, or the shapes do not match.
    """
    match = _MODULE.fullmatch(layer)
    if match is None:
        return None
    paths = _layers_of_experts(reader, layer, match["layer"])
    a, b = reader.halves(layer, pair)
    has_gates = "gate_proj" in paths
    up, down = ("up_proj", "down_proj") if has_gates else ("fc1", "fc2")
    num_experts, width, hidden = reader.targets.experts[paths[up]]
    what = f"the tensors of {layer!r}"
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) % num_experts or not len(a):
        expected = f"of equal rank above 0 for each of {num_experts} experts"
        raise reader.error(what, expected, f"shapes {a.shape} and {b.shape}")
    rank, found = len(a) // num_experts, (a.shape[1], len(b))
    if not has_gates and width == hidden:
        raise reader.error(what, "of layers with more or fewer outputs than inputs", str(width))
    first = {(width, 2 * hidden): "gate_up_proj"} if has_gates else {(width, hidden): "up_proj"}
    shapes = {**first, (hidden, width): "down_proj"}
    is_swapped = found not in shapes
    parameter = shapes.get(found[::-1] if is_swapped else found)
    if parameter is None:
        expected = f"of one of {sorted(shapes)} inputs and outputs"
        raise reader.error(what, expected, f"{found[0]} and {found[1]}")
    a = a.reshape(num_experts, rank, -1)
    b = b.reshape(len(b), rank, num_experts).transpose(2, 1, 0)
    if is_swapped:
        a, b = b, a
    a = np.ascontiguousarray(a)
    b = b * np.float32(reader.scale_of(f"{match['module']}.{parameter}", rank))
    if parameter == "gate_up_proj":
        alternate = reader.targets.interleaves_experts
        gates = slice(0, None, 2) if alternate else slice(0, hidden)
        ups = slice(1, None, 2) if alternate else slice(hidden, None)
        return {
            paths["gate_proj"]: LowRank(a, np.ascontiguousarray(b[..., gates])),
            paths["up_proj"]: LowRank(a, np.ascontiguousarray(b[..., ups])),
        }
    return {paths[down if parameter == "down_proj" else up]: LowRank(a, np.ascontiguousarray(b))}


def _layers_of_experts(reader: Reader, layer: str, number: str) -> dict[str, str]:
    """Returns the paths of a decoder layer's layers of experts in the model, by their names."""
    targets = reader.targets
    known = [path for path in (*targets.experts, *targets.refused) if f".{number}." in f".{path}"]
    found: dict[str, str] = {}
    for path in known:
        name = path.rpartition(".")[2]
        if path in targets.experts:
            found[name] = path
        elif "experts" in targets.refused[path]:
            raise reader.error(
                f"the layer {layer!r}", "experts that adapters can change", targets.refused[path]
            )
    if found.keys() not in ({"gate_proj", "up_proj", "down_proj"}, {"fc1", "fc2"}):
        expected = "one with experts"
        raise reader.error(f"the layer {layer!r}", expected, ", ".join(found) or "no experts")
    return found
