"""Readers: match the tensors of an adapter's files with a model's layers, in each format.

===========  =============================  ============================
             mlx-lm                         PEFT
===========  =============================  ============================
config       ``adapter_config.json``        ``adapter_config.json``
weights      ``adapters.safetensors``       ``adapter_model.safetensors``
names        ``PATH.lora_a``                ``base_model.model.PATH.lora_A.weight``
shapes       a [in, r], b [r, out]          A [r, in], B [out, r]
scale        ``lora_parameters.scale``      alpha / r, or alpha / sqrt(r)
experts      a [E, r, in], b [E, out, r]    each by itself: ``experts.3``
===========  =============================  ============================

PEFT can also change parameters that hold all experts (`parameters`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mlx_paged.engine.lora.parameters import of_parameter
from mlx_paged.errors import AdapterError
from mlx_paged.model.lora import AdapterTargets
from mlx_paged.model.lora_slots import LowRank

# A layer of one expert in PEFT's files, and where mlx-lm keeps it.
_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<name>\w+)")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's
_AROUND_EXPERTS = ("switch_mlp", "switch_glu", "experts")


class Reader:
    """Reads one file format.

    Args:
        path: The adapter's directory, for errors.
        targets: The model's layers that adapters may change.
    """

    pattern: re.Pattern[str]  # matches a tensor's name; groups: layer (its path), half (a or b)
    transposed: bool  # True if a is [in, r] and b is [r, out]; False if both are transposed

    def __init__(self, path: str, config: dict[str, Any], targets: AdapterTargets) -> None:
        self.path, self.config, self.targets = path, config, targets
        self._found: dict[str, list[str]] = {}  # layers of the model, by a file's name
        self.check_config()

    def check_config(self) -> None:
        """Raises `AdapterError` for an unsupported kind of adapter."""
        raise NotImplementedError

    def scale_of(self, layer: str, rank: int) -> float:
        """Returns the scale of a layer's update."""
        raise NotImplementedError

    def error(self, what: str, expected: str, given: str) -> AdapterError:
        """Returns an error about a field of the config or a tensor."""
        return AdapterError(self.path, f"{what} must be {expected} but got {given}")

    def number(self, name: str, value: object) -> float:
        """Returns a config field as a finite number.

        Raises:
            AdapterError: It is anything else.
        """
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.error(name, "a number", repr(value))
        return float(value)  # type: ignore[arg-type]

    def layers_of(self, tensors: Mapping[str, np.ndarray]) -> dict[str, LowRank]:
        """Matches the tensors with layers of the model.

        Raises:
            AdapterError: A tensor is not half of an update of one of the model's linear layers.
        """
        pairs: dict[str, dict[str, np.ndarray]] = {}
        for name in sorted(tensors):  # Files list them in any order.
            match = self.pattern.fullmatch(name)
            if match is None:
                raise self.refuse(name)
            pairs.setdefault(match["layer"], {})[match["half"].lower()] = tensors[name]
        if not pairs:
            raise self.error("the weights", "at least one low-rank tensor", "none")
        found: dict[str, LowRank] = {}
        of_experts: dict[str, dict[int, LowRank]] = {}
        matched = (change for layer, pair in pairs.items() for change in self.changes(layer, pair))
        for path, expert, change in matched:
            if path in found or expert in of_experts.get(path, {}):
                raise AdapterError(self.path, f"two of its layers match {path!r} of the model")
            if expert is None:
                found[path] = change
            else:
                of_experts.setdefault(path, {})[expert] = change
        for path, changes in of_experts.items():
            if path in found:
                raise AdapterError(self.path, f"two of its layers match {path!r} of the model")
            found[path] = _stacked(changes, self.targets.experts[path][0])
        return found

    def changes(
        self, layer: str, pair: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, int | None, LowRank]]:
        """Yields the updates that a pair of tensors stands for: each with its path in the model,
        and the expert's number if it is of a single one.

        Args:
            pair: The halves a and b.
        """
        path, expert = self._path_in_model(layer)
        yield path, expert, self._change(layer, path, expert, pair)

    def refuse(self, name: str) -> AdapterError:
        """Returns the error for a tensor that is not half of a low-rank update."""
        expected = "half of a low-rank update of a linear layer or of experts"
        if re.search(r"\.m$|lora_magnitude_vector", name):
            expected += " (DoRA is not supported)"
        elif "lora_embedding" in name:
            expected += " (adapters of embeddings are not supported)"
        return self.error("every tensor", expected, repr(name))

    def _path_in_model(self, layer: str) -> tuple[str, int | None]:
        """Finds a layer by its path, or by the part of the path from the layer number on.

        Multimodal models wrap the language model, which puts other names in front.

        Returns:
            The path, and the expert's number if the layer is one expert's.

        Raises:
            AdapterError: The model has no such linear layer, or several.
        """
        targets, what = self.targets, f"the layer {layer!r}"
        one = _EXPERT.fullmatch(layer)
        if one is not None:
            name = _EXPERT_NAMES.get(one["name"], one["name"])
            for inner in _AROUND_EXPERTS:
                found = self._ending_with(f"{one['block']}.{inner}.{name}")
                if len(found) == 1 and found[0] in targets.experts:
                    expert, num_experts = int(one["expert"]), targets.experts[found[0]][0]
                    if expert >= num_experts:
                        raise self.error(what, f"one of {num_experts} experts", str(expert))
                    return found[0], expert
        found = self._ending_with(layer)
        if len(found) == 1 and (found[0] in targets.linear or found[0] in targets.experts):
            return found[0], None
        if not found:
            raise self.error(what, "a linear layer of the model", "a name that it lacks")
        if len(found) > 1:
            raise self.error(what, "one linear layer of the model", ", ".join(found))
        raise self.error(what, "a linear layer within the model", self.targets.refused[found[0]])

    def halves(self, layer: str, pair: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns both halves. Raises `AdapterError` if one is missing."""
        if pair.keys() != {"a", "b"}:
            given = f"only {''.join(pair)}"
            raise self.error(f"the layer {layer!r}", "given as both a and b", given)
        return pair["a"], pair["b"]

    def _ending_with(self, layer: str) -> list[str]:
        """Returns the model's layer of this path, or those with the same path from the layer number
        on."""
        found = self._found.get(layer)  # Many experts ask for one layer.
        if found is not None:
            return found
        known = [*self.targets.linear, *self.targets.experts, *self.targets.refused]
        end = re.search(r"(?:^|\.)(layers\.\d+\..*|h\.\d+\..*|lm_head|embed_tokens)$", layer)
        if layer in known:
            found = [layer]
        elif end is None:
            found = []
        else:
            found = [path for path in known if f".{path}".endswith(f".{end[1]}")]
        self._found[layer] = found
        return found

    def _change(
        self, layer: str, path: str, expert: int | None, pair: Mapping[str, np.ndarray]
    ) -> LowRank:
        """Returns the update of a layer; if it has experts, of one or all of them."""
        a, b = self.halves(layer, pair)
        what = f"the tensors of {layer!r}"
        of_experts = path in self.targets.experts
        shape = self.targets.experts[path] if of_experts else self.targets.linear[path]
        *experts, width, out_features = shape
        leading = () if expert is not None else tuple(experts)
        if a.ndim != 2 + len(leading) or b.ndim != a.ndim:
            expected = "a matrix for each expert" if leading else "matrices"
            raise self.error(what, expected, f"shapes {a.shape} and {b.shape}")
        if self.transposed and not leading:
            a = a.T
        else:
            b = b.swapaxes(-1, -2)
        rank = a.shape[-2]
        shapes = (*leading, rank, width), (*leading, rank, out_features)
        if not rank or (a.shape, b.shape) != shapes:
            expected = f"{width} inputs and {out_features} outputs,"
            given = (
                f"ranks {rank} and {b.shape[-2]}, {a.shape[-1]} inputs and {b.shape[-1]} outputs"
            )
            if leading:
                expected = f"{leading[0]} experts, {expected}"
                given = f"{len(a)} and {len(b)} experts, {given}"
            raise self.error(what, f"of equal rank above 0, with {expected}", given)
        scale = np.float32(self.scale_of(layer, rank))
        return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b) * scale)


def _stacked(changes: Mapping[int, LowRank], num_experts: int) -> LowRank:
    """Joins the updates of single experts. The others do not change."""
    rank = max(change.rank for change in changes.values())
    halves = []
    for half in zip(*changes.values()):
        stacked = np.zeros((num_experts, rank, half[0].shape[1]), np.float32)
        for expert, values in zip(changes, half):
            stacked[expert, : len(values)] = values
        halves.append(stacked)
    return LowRank(*halves)


class MlxReader(Reader):
    pattern = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[ab])")
    transposed = True

    def check_config(self) -> None:
        kind = self.config.get("fine_tune_type", "lora")
        if kind != "lora":
            raise self.error("fine_tune_type", "'lora'", repr(kind))
        parameters = self.config.get("lora_parameters")
        if not isinstance(parameters, dict) or "scale" not in parameters:
            raise self.error("lora_parameters", "an object with a scale", repr(parameters))

    def scale_of(self, layer: str, rank: int) -> float:
        return self.number("lora_parameters.scale", self.config["lora_parameters"]["scale"])


class OlderMlxVlmReader(Reader):
    """mlx-vlm's files before it took over mlx-lm's format."""

    pattern = re.compile(r"(?P<layer>.+)\.(?P<half>[AB])")
    transposed = True

    def check_config(self) -> None:
        for name in ("rank", "alpha"):
            self.number(name, self.config.get(name))

    def scale_of(self, layer: str, rank: int) -> float:
        declared = self.number("rank", self.config["rank"])
        if declared != rank:
            raise self.error(f"the rank of {layer!r}", f"rank ({declared:g})", str(rank))
        return self.number("alpha", self.config["alpha"]) / rank


class PeftReader(Reader):
    pattern = re.compile(
        r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight"
    )
    transposed = False

    # Fields that change what an adapter computes, each with the values that mean plain LoRA.
    plain: Mapping[str, tuple[Any, ...]] = {
        "use_dora": (False, None),
        "bias": ("none", None),
        "lora_bias": (False, None),
        "modules_to_save": (None, []),
        "trainable_token_indices": (None, [], {}),
        "layer_replication": (None, []),
        "use_qalora": (False, None),
        "alora_invocation_tokens": (None, []),
        "megatron_config": (None, {}),
        "arrow_config": (None,),
        "kasa_config": (None,),
        "monteclora_config": (None,),
        "use_bdlora": (None, False),
        # Others change the model's weights, too.
        "init_lora_weights": (True, False, None, "gaussian", "eva", "mica", "orthogonal"),
    }

    def check_config(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise self.error("peft_type", "'LORA'", repr(kind))
        for name, allowed in self.plain.items():
            value = self.config.get(name)
            if not any(value == each and type(value) is type(each) for each in allowed):
                raise self.error(name, repr(allowed[0]), repr(value))
        parameters = self.config.get("target_parameters")
        if parameters is not None and not (
            isinstance(parameters, list) and all(isinstance(each, str) for each in parameters)
        ):
            raise self.error("target_parameters", "a list of strings", repr(parameters))

    def changes(
        self, layer: str, pair: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[str, int | None, LowRank]]:
        """See `Reader.changes`. Parameters of experts are of all experts, and of two layers."""
        found = of_parameter(self, layer, pair) if self.config.get("target_parameters") else None
        if found is None:
            yield from super().changes(layer, pair)
        else:
            for path, change in found.items():
                yield path, None, change

    def scale_of(self, layer: str, rank: int) -> float:
        """Returns alpha / rank, see `Reader`. The config's rank must match the tensors."""
        declared = self._of_layer("rank_pattern", "r", layer)
        if declared != rank:
            raise self.error(f"the rank of {layer!r}", f"r ({declared:g})", str(rank))
        alpha = self._of_layer("alpha_pattern", "lora_alpha", layer)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _of_layer(self, patterns: str, default: str, layer: str) -> float:
        """Returns a layer's value: the first pattern matching the end of its path, as in PEFT."""
        by_pattern = self.config.get(patterns) or {}
        if not isinstance(by_pattern, dict):
            raise self.error(patterns, "an object of patterns", repr(by_pattern))
        for pattern, value in by_pattern.items():
            try:
                matches = re.fullmatch(rf"(.*\.)?({pattern})", layer)
            except re.error as error:
                expected = f"an object of regular expressions ({error})"
                raise self.error(patterns, expected, repr(pattern)) from error
            if matches:
                return self.number(f"{patterns}[{pattern!r}]", value)
        return self.number(default, self.config.get(default))
