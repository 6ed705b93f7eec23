"""A step is data: every batch survives pickling, and the device half needs nothing else."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import mlx_paged

# isort: split
import numpy as np
import pytest
from support.models import embedded, embedded_twin

from mlx_paged.core import StepBatch, StepResult
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.executor import Executor, InProcessExecutor
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.model.loader import LoadedModel

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])


class PickledExecutor:
    """Sends every batch and every result through pickle, as to another process."""

    def __init__(self, inner: InProcessExecutor) -> None:
        self.inner = inner
        self.batches: list[bytes] = []
        self.kinds: set[str] = set()

    @property
    def num_faults(self) -> int:
        return self.inner.num_faults

    def launch(self, batch: StepBatch) -> None:
        sent = pickle.dumps(batch)
        self.batches.append(sent)
        self.kinds |= kinds_of(batch)
        self.inner.launch(pickle.loads(sent))

    def read(self) -> StepResult:
        result = pickle.loads(pickle.dumps(self.inner.read()))
        assert isinstance(result, StepResult)
        return result

    def reset(self) -> None:
        self.inner.reset()

    def check(self) -> None:
        self.inner.check()


def kinds_of(batch: StepBatch) -> set[str]:
    """Names the kinds of content in a batch; the workload must have all of them."""
    kinds = {"decode" if batch.is_decode else "mixed"}
    edits = [] if batch.sampling is None else [edit for _, edit in batch.sampling.edits]
    found = {
        "in flight": any(at >= 0 for at in batch.input_from),
        "copies": any(batch.block_copies),
        "prompt reports": bool(batch.prompt_targets),
        "penalties": any(edit.penalties is not None for edit in edits),
        "grammar": any(edit.grammar is not None for edit in edits),
        "token mask": any(edit.mask is not None for edit in edits),
        "biases": any(edit.additions is not None for edit in edits),
        "slots": bool(batch.slots),
    }
    return kinds | {kind for kind, is_there in found.items() if is_there}


def workload() -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    """Requests of every kind, with shared prefixes, more of them than run at once."""
    rng = np.random.default_rng(3)
    stem = rng.integers(10, 900, 21).tolist()

    def prompt(count: int) -> list[int]:
        return [*stem, *rng.integers(10, 900, count).tolist()]

    def odd(index: int, tokens: Any) -> np.ndarray:
        return np.arange(embedded().config["vocab_size"]) % 2 == len(tokens) % 2

    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.0}, {}),
        ({"temperature": 0.8, "seed": 1, "top_p": 0.9}, {}),
        ({"temperature": 0.7, "seed": 2, "top_k": 20, "n": 3}, {}),
        ({"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4}, {}),
        ({"temperature": 0.0, "logit_bias": {7: 5.0}, "bad_words": ["the", "return x"]}, {}),
        ({"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, {}),
        ({"temperature": 0.0, "structured_outputs": {"regex": "[a-z]{3} [0-9]+"}}, {}),
        ({"temperature": 0.6, "seed": 5, "stop": ["e"], "min_tokens": 4}, {}),
        ({"temperature": 0.0}, {"token_mask": odd}),
        ({"temperature": 0.0, "allowed_token_ids": [5, 6, 7, 8]}, {"priority": 1}),
    ]
    return [
        (prompt(5 * i), SamplingParams(**{"max_tokens": 14, **params}), options)
        for i, (params, options) in enumerate(settings)
    ]


def answers(engine: Engine) -> list[list[Any]]:
    outputs = [
        engine.add_request(str(i), tokens, params, **options)
        for i, (tokens, params, options) in enumerate(workload())
    ]
    while engine.has_unfinished:
        engine.step()
        engine.check_integrity()
    return [
        [
            (a.token_ids, a.text, a.finish_reason, a.cumulative_logprob, repr(a.logprobs))
            for a in output.outputs
        ]
        + [repr(output.prompt_logprobs)]
        for output in outputs
    ]


def make(model: LoadedModel, overlap: bool, num_blocks: int = 60) -> Engine:
    config = EngineConfig(
        num_gpu_blocks_override=num_blocks,
        block_size=8,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        async_scheduling=overlap,
    )
    return Engine(model, config)


@OVERLAP
@pytest.mark.parametrize("num_blocks", [60, 24], ids=["room", "pressure"])
def test_batches_that_were_pickled_give_the_same_tokens(overlap: bool, num_blocks: int) -> None:
    wanted = answers(make(embedded_twin(), overlap, num_blocks))
    engine = make(embedded_twin(), overlap, num_blocks)
    executor = PickledExecutor(engine._executor)  # type: ignore[arg-type]
    engine._executor = executor
    assert answers(engine) == wanted
    expected = {"decode", "mixed", "copies", "prompt reports", "penalties", "grammar"}
    expected |= {"token mask", "biases"} | ({"in flight"} if overlap else set())
    assert expected <= executor.kinds
    assert num_blocks > 24 or engine.stats().num_preemptions > 0
    assert all(b"mlx_paged.core.request" not in sent for sent in executor.batches)


def test_an_executor_is_a_protocol() -> None:
    """Nothing in the engine asks for more than launch, read, reset, check and the number of
    faults."""
    asked = set()
    path = Path(mlx_paged.__file__).parent / "engine"
    for source in path.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "_executor"
            ):
                asked.add(node.attr)
    assert asked == {"launch", "read", "reset", "check", "num_faults"}
    assert {name for name in vars(Executor) if not name.startswith("_")} <= asked


def test_an_adapter_that_the_batch_does_not_bring_is_refused() -> None:
    """The step fails, and with it its sequences; nothing is ignored."""
    engine = make(embedded_twin(), overlap=False)
    launch = engine._executor.launch

    def altered(batch: StepBatch) -> None:
        batch.adapter_ids[0] = 1
        launch(batch)

    engine._executor.launch = altered  # type: ignore[method-assign]
    output = engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    [answer] = output.outputs
    assert answer.finish_reason == "error"
    assert "adapter_ids must be 0 or slots of adapters" in answer.error.reason  # type: ignore[union-attr]


def test_the_device_half_names_no_scheduler_object() -> None:
    """Runner, executor and sampler read the batch: neither `Sequence` nor `Request` of the core."""
    engine = Path(mlx_paged.__file__).parent / "engine"
    device = ["runner", "executor", "step_parts", "sampling/sampler", "pooling/runner"]
    device += ["sampling/logits_processors", "sampling/logprobs", "warm_up", "memory"]
    allowed = {"StepBatch", "StepResult", "StepTable", "StateMove", "ScheduledMedia"}
    allowed |= {"PromptLogprobs", "PooledStates", "TOKEN_TYPE", "outside", "PromptMedia"}
    allowed |= {"RejectedItem", "StepTime"}
    for name in [*device, "../multimodal/step_media", "../multimodal/feature_store"]:
        for node in ast.walk(ast.parse((engine / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "mlx_paged.core"
            ):
                names = {alias.name for alias in node.names} - {"MediaSpan"}
                assert names <= allowed, f"{name} imports {names - allowed}"
