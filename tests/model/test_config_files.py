"""Tests which fields of `config.json` and `generation_config.json` are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.errors import InvalidParameterError
from mlx_paged.model.config_files import (
    eos_token_ids,
    model_len,
    read_generation_config,
    vocab_size,
)


def test_a_text_model_of_a_multimodal_one_speaks_for_itself() -> None:
    """Fields beside the text config may be the vision model's, or an alias of a field."""
    inner = {"vocab_size": 96, "max_position_embeddings": 300}
    config = {"vocab_size": 7, "max_position_embeddings": 11, "text_config": inner}
    assert vocab_size(config) == 96 and model_len(config) == 300
    config["text_config"] = {"num_vocab": 50, "n_positions": 20}
    assert vocab_size(config) == 50 and model_len(config) == 20


def test_text_models_have_sections_of_several_names() -> None:
    inner = {"vocab_size": 96, "max_position_embeddings": 300}
    for config in (
        {"llm_config": inner},
        {"language_config": inner},
        {"thinker_config": {"text_config": inner}, "talker_config": {"text_config": {}}},
    ):
        assert vocab_size(config) == 96 and model_len(config) == 300


@pytest.mark.parametrize("inner", [None, {}, {"vocab_size": None}, {"vocab_size": 0}, "text", 3])
def test_what_a_text_config_leaves_out_is_beside_it(inner: Any) -> None:
    assert vocab_size({"vocab_size": 7, "text_config": inner}) == 7
    assert model_len({"n_ctx": 9, "max_position_embeddings": None, "text_config": inner}) == 9


def test_a_length_may_be_missing_and_a_vocabulary_may_not() -> None:
    assert model_len({"vocab_size": 7}) is None
    with pytest.raises(KeyError, match=r"vocab_size or num_vocab"):
        vocab_size({"n_ctx": 9})


def test_the_usual_name_of_a_length_comes_first() -> None:
    assert model_len({"n_ctx": 1, "max_seq_len": 2, "n_positions": 3}) == 3
    assert model_len({"n_ctx": 1, "model_max_length": 2, "max_position_embeddings": 4}) == 4


@pytest.mark.parametrize(
    ("given", "ids"), [(None, set()), (0, {0}), (7, {7}), ([7, 0, 7], {0, 7}), ([], set())]
)
def test_end_tokens_are_one_id_or_several(given: Any, ids: set[int]) -> None:
    assert eos_token_ids({"eos_token_id": given}) == ids
    assert eos_token_ids({}) == set()


@pytest.mark.parametrize("given", [-1, [3, -1], True, [False], 1.0, "7", ["7"], [[7]], {"id": 7}])
def test_end_tokens_that_are_no_ids_are_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="eos_token_id must be token ids of at least 0"):
        eos_token_ids({"eos_token_id": given})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(InvalidParameterError, match="eos_token_id"):
        read_generation_config(tmp_path)
