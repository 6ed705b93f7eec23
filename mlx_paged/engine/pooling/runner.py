"""Runs steps whose results are pooled hidden states, and joins the parts of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.core import PooledStates, StepBatch, StepResult
from mlx_paged.engine.faults import HIDDEN_NOT_FINITE
from mlx_paged.engine.input_tokens import KnownTokens
from mlx_paged.engine.pooling.params import MEAN, PoolerConfig, PoolingParams
from mlx_paged.engine.runner import Chosen, LaunchedStep, ModelRunner
from mlx_paged.model.classification import ClassificationHead
from mlx_paged.model.layout import KVCacheGroupSpec
from mlx_paged.model.paged_model import PagedModel

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classifier:
    """Maps a hidden state to one probability per class."""

    head: ClassificationHead

    @classmethod
    def of(cls, model: PagedModel, token_ids: Sequence[int]) -> Classifier:
        """Scores by the sigmoid of one token's logit, or of the second minus the first."""
        weights, biases = model.output_weights(token_ids)
        rows = np.array(weights).astype(np.float64)
        offsets = np.array(biases).astype(np.float64)
        if len(token_ids) == 2:
            rows, offsets = rows[1:] - rows[:1], offsets[1:] - offsets[:1]
        return cls(ClassificationHead(rows, offsets, "sigmoid", ("LABEL_0",)))

    def __call__(self, state: npt.NDArray[np.float64], *, activate: bool = True) -> FloatArray:
        """Returns the probabilities, ``[num_classes]`` float32.

        Args:
            state: ``[hidden_size]``.
            activate: False returns the layer's outputs.
        """
        values = self.head.weights @ state + self.head.bias
        if activate and self.head.activation == "sigmoid":
            values = 0.5 * (1 + np.tanh(values / 2))
        elif activate and self.head.activation == "softmax":
            values = np.exp(values - values.max())
            values /= values.sum()
        return values.astype(np.float32)


class PooledPrompt:
    """The hidden states of one prompt, as far as they have been computed.

    A prompt is computed in chunks, and chunks may arrive again: in smaller parts after a failed
    step, or from the first token on after a preemption. So parts are kept by position, and a new
    part replaces everything from its position on.

    Args:
        num_tokens: Tokens of the prompt.
        config: The engine's pooler config, complete.
        params: The request's parameters.
        classifier: Maps the last state to probabilities; None for an embedding.
    """

    def __init__(
        self,
        num_tokens: int,
        config: PoolerConfig,
        params: PoolingParams,
        classifier: Classifier | None = None,
    ) -> None:
        self._num_tokens = num_tokens
        self._config = config
        self._params = params
        self._classifier = classifier
        self._parts: dict[int, tuple[int, FloatArray]] = {}  # by start: (end, sum or last state)

    def record(self, start: int, end: int, states: FloatArray) -> None:
        """Records the states of tokens `[start, end)`.

        Args:
            states: ``[hidden_size]`` float32: their sum, or the state of the last one.
        """
        self._parts = {at: part for at, part in self._parts.items() if at < start}
        self._parts[start] = end, states

    def start_over(self) -> None:
        """Called after an interrupted step. Nothing to do: the parts stay valid (see above)."""

    def result(self) -> FloatArray:
        """Returns the embedding ``[dimensions]`` or the classes ``[num_classes]``, float32, of the
        prompt.

        Computed in float64.
        """
        if self._config.pooling_type == MEAN:
            expected = 0
            for start, (end, _) in self._parts.items():
                assert start == expected, f"tokens {expected} to {start} were not pooled"
                expected = end
            assert expected == self._num_tokens, f"{expected} of {self._num_tokens} tokens pooled"
            sums = np.stack([states for _, states in self._parts.values()]).astype(np.float64)
            vector = sums.sum(axis=0) / self._num_tokens
        else:
            [(end, states)] = self._parts.values()
            assert end == self._num_tokens, f"token {end} of {self._num_tokens} was pooled"
            vector = states.astype(np.float64)
        if self._classifier is not None:
            return self._classifier(vector, activate=self._params.normalize is not False)
        own = self._params
        vector = vector[: own.dimensions or self._config.dimensions]
        if self._config.normalize if own.normalize is None else own.normalize:
            # Like torch, this keeps a vector of zeros.
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


@dataclass(eq=False)
class LaunchedPooling(LaunchedStep):
    """A step of prompts to be pooled."""

    indices: tuple[int, ...] = ()  # batch indices of the sequences that it pools
    pooled: mx.array | None = None  # [len(indices), hidden_size] float32, viewed as int32

    @property
    def results(self) -> list[mx.array]:
        return [self.chosen.reported, *([] if self.pooled is None else [self.pooled])]


class PoolingRunner(ModelRunner):
    """A runner without logits: the "token" of a sequence only says that its prompt is computed.

    Args:
        model: Returns hidden states instead of logits from now on.
        pooling_type: "LAST" or "MEAN".
        windows: See `ModelRunner`.

    Attributes:
        hidden_size: Size of a hidden state.

    Raises:
        ValueError: See `PagedModel.keep_hidden_states`.
    """

    def __init__(
        self, model: PagedModel, pooling_type: str, *, windows: Sequence[KVCacheGroupSpec] = ()
    ) -> None:
        self.hidden_size = model.keep_hidden_states()
        self._sums = pooling_type == MEAN
        super().__init__(model, windows=windows)

    def _launch(
        self,
        batch: StepBatch,
        previous: LaunchedStep | KnownTokens | None,
        pools_before: list[mx.array],
        features: mx.array | None = None,
        bounds: np.ndarray | None = None,
    ) -> LaunchedStep:
        self._copy_blocks(batch)
        num_rows = np.frombuffer(batch.query_lens, dtype=np.int64)
        context_lens = np.frombuffer(batch.starts, dtype=np.int64) + num_rows
        ends = np.cumsum(num_rows)
        indices = [i for i, ends_here in enumerate(batch.samples) if self._sums or ends_here]
        # A mean needs the states of all tokens, other types only that of each prompt's last token.
        wanted = np.arange(ends[-1]) if self._sums else (ends - 1)[indices]
        flat = np.frombuffer(batch.token_ids, dtype=np.uint32).astype(np.int32)
        inputs = replace(self._inputs(batch, context_lens, num_rows, wanted), may_pad=False)
        repetition = self.model.repetition_of(inputs, len(flat))
        hidden, _, _, taps = self.model.run(ops.upload(flat)[0], inputs, repetition)
        nothing = mx.zeros((sum(batch.samples),), dtype=mx.int32)
        pooled = None
        if indices:
            if self._sums:
                hidden = _sums(hidden, ends.tolist())
            pooled = ops.to_host(hidden.astype(mx.float32).view(mx.int32))
        pools = self.model.pools()
        launched = LaunchedPooling(
            batch, pools[-1], pools_before, indices=tuple(indices), pooled=pooled
        )
        launched.chosen = Chosen(nothing, nothing)
        mx.async_eval(*launched.results, *pools, *taps)  # type: ignore[no-untyped-call]
        return launched

    @staticmethod
    def read(launched: LaunchedStep) -> StepResult:
        """Waits for a step and returns pooled states, with meaningless tokens."""
        result = ModelRunner.read(launched)
        assert isinstance(launched, LaunchedPooling)
        if launched.pooled is None:
            return result
        states, batch = np.array(launched.pooled).view(np.float32), launched.batch
        finite = [bool(np.isfinite(row).all()) for row in states]
        for index, row, is_finite in zip(launched.indices, states, finite):
            if is_finite:
                start = batch.starts[index]
                end = start + batch.query_lens[index]
                result.pooled.append(PooledStates(index, start, end, row))
            else:
                result.token_ids[index] = []
                result.failures.append((index, HIDDEN_NOT_FINITE))
                result.is_poisoned = True
        return result


def _sums(hidden: mx.array, ends: list[int]) -> mx.array:
    """Sums ranges of rows: ``[T, hidden_size]`` -> ``[len(ends), hidden_size]`` float32.

    Each sum is a separate reduction, so it does not depend on the rest of the step.
    """
    starts = [0, *ends[:-1]]
    return mx.stack([hidden[a:b].astype(mx.float32).sum(axis=0) for a, b in zip(starts, ends)])
