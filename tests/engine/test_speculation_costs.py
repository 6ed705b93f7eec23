"""The measurement of steps chooses experts as text does."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import switch_layers
from support.models import embedded, tiny_config, tiny_model

from mlx_paged.demo.prompts import SYSTEM_PROMPT
from mlx_paged.engine.runner import ModelRunner
from mlx_paged.engine.speculation import costs
from mlx_paged.model.wrap import build_paged_model

NUM_EXPERTS, TOP_K = 32, 2
VOCAB_SIZE = 4096  # the embedded model's, whose tokens the text has
CONFIG = tiny_config(
    "qwen3_moe",
    vocab_size=VOCAB_SIZE,
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=TOP_K,
    moe_intermediate_size=32,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
)


def experts_of(model: Any, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> float:
    """Mean number of experts that a layer runs for some rows, each after a prefix of its own."""
    chosen: list[np.ndarray] = []
    real = switch_layers.SwitchGLU.__call__

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        chosen.append(np.unique(np.array(indices)))
        return real(self, x, indices)

    with monkeypatch.context() as patch:
        patch.setattr(switch_layers.SwitchGLU, "__call__", call)
        mx.eval(model(mx.array(tokens[:, None])))
    return float(np.mean([len(each) for each in chosen]))


def test_measured_rows_choose_as_many_experts_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(CONFIG)
    runner = ModelRunner(
        build_paged_model(tiny_model(CONFIG), CONFIG, block_size=16), num_blocks=64
    )
    launched: list[np.ndarray] = []
    launch = runner.launch

    def record(batch: Any, *rest: Any) -> Any:
        launched.append(np.frombuffer(batch.token_ids, dtype=np.uint32))
        return launch(batch, *rest)

    monkeypatch.setattr(runner, "launch", record)
    found = costs.measure(
        runner,
        max_num_seqs=8,
        max_context_len=512,
        num_tokens=VOCAB_SIZE,
        clock=lambda: 0.0,  # All sizes are measured, even on a slow machine.
    )
    assert found is not None and found.rows[0] == 1
    assert embedded().config["vocab_size"] == VOCAB_SIZE
    text = np.array(embedded().tokenizer.encode(SYSTEM_PROMPT), dtype=np.uint32)
    by_rows = {len(tokens): tokens for tokens in launched if len(tokens) in (2, 4, 8)}
    assert len(by_rows) == 3
    for count, tokens in by_rows.items():
        places = range(0, len(text) - count, 16)
        expected = [experts_of(model, text[i : i + count], monkeypatch) for i in places]
        # Windows of the text differ by 4 to 6 %; rows of one token would choose TOP_K experts.
        assert experts_of(model, tokens, monkeypatch) == pytest.approx(np.mean(expected), rel=0.2)
