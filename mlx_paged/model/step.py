"""What the layers of one forward share, and where they find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.model.dense_prefill import DensePrefill
from mlx_paged.model.recurrent import StatePlan
from mlx_paged.model.specs import Reach
from mlx_paged.ops import AttentionPlan


@dataclass(frozen=True)
class Step:
    """One forward over ragged sequences.

    Attributes:
        plan: Of the layers that see everything; positions and slots of every row.
        logit_rows: ``[num_samples]`` int32: rows whose logits are wanted.
        plans: Of layers with another reach. One that is missing here reads through `plan`.
        states: Of recurrent layers; None for a model that has none.
        prefill: Of layers that see everything, where long chunks take MLX's own attention.
        starts_early: Whether the device is to work on the first layers while the last ones are
            still being built.
    """

    plan: AttentionPlan
    logit_rows: mx.array
    plans: Mapping[Reach, AttentionPlan] = field(default_factory=dict)
    states: StatePlan | None = None
    prefill: DensePrefill | None = None
    starts_early: bool = False

    def plan_for(self, reach: Reach) -> AttentionPlan:
        """The plan that layers of this reach read and write through."""
        return self.plans.get(reach, self.plan)


class StepContext:
    """Holds the step that is being built. One per model; its caches and output head look here."""

    def __init__(self) -> None:
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """The current step; an error outside of one, where a paged cache has no meaning."""
        if self._step is None:
            raise RuntimeError("a paged cache was used outside of a step of the model runner")
        return self._step

    @property
    def active(self) -> bool:
        """Whether a step is being built."""
        return self._step is not None

    def enter(self, step: Step) -> None:
        """Starts building `step`."""
        self._step = step

    def leave(self) -> None:
        """Ends it: the arrays of a finished step must not be kept alive here."""
        self._step = None
