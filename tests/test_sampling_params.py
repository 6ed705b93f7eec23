"""Sampling parameters: every value that cannot be honoured is refused, with its name."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError

EOS = frozenset({2})

INVALID: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, 1.5, "1", None, True],
    "temperature": [-0.1, -1, float("nan"), float("inf"), float("-inf"), "0.7", None, [1.0]],
    "max_tokens": [0, -1, 1.0, 2.5, "16", True],
    "stop": ["", [""], ["ok", ""], [3], 3, b"bytes", [b"bytes"], [None]],
    "stop_token_ids": [[-1], [1.5], ["1"], [True], [None], 3, "3"],
    "ignore_eos": ["no", None, 2],
    "seed": [1.5, "1", True, [1]],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in INVALID.items() for value in values]
)
def test_an_invalid_value_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=rf"^{field} must be ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 1e-9},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop": ()},
        {"stop_token_ids": [0, 5]},
        {"ignore_eos": True},
        {"seed": 0},
        {"seed": -5},
        {"seed": 2**70},
        {"seed": None},
    ],
    ids=str,
)
def test_valid_values_are_kept(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        kept = getattr(params, name)
        assert kept == (tuple(value) if isinstance(value, list) else value) or kept == (value,)


def test_none_stands_for_no_stops() -> None:
    """As in vLLM and in the OpenAI API, where null is what an absent `stop` is."""
    params = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert params.stop_strings == ()
    assert params.stop_policy(EOS).stop_token_ids == frozenset()


def test_one_stop_string_is_not_taken_apart() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["end", "fin"]).stop_strings == ("end", "fin")


def test_parameters_cannot_be_changed_or_share_a_callers_list() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert params.stop_strings == ("a",) and tuple(params.stop_token_ids) == (1,)
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))


def test_the_schedulers_part_says_when_to_stop() -> None:
    policy = SamplingParams(max_tokens=9, stop_token_ids=[7], ignore_eos=True).stop_policy(EOS)
    assert policy.max_tokens == 9
    assert policy.stop_token_ids == {7}
    assert policy.eos_token_ids == EOS
    assert policy.ignore_eos
    assert SamplingParams(max_tokens=None).stop_policy(EOS).max_tokens is None
