"""Sampling parameters: vLLM's names and defaults; what cannot be honoured is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidParameterError

NAN, INF = float("nan"), float("inf")
EOS = frozenset({2})

INVALID: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, 1.5, "1", None, True, 16385, 10**6, 10**400],
    "temperature": [-0.1, -1, NAN, INF, -INF, "0.7", None, [1.0], 1e39, 10**400, 1j],
    "max_tokens": [0, -1, 1.0, 2.5, "16", True, 10**400],
    "stop": [
        "",
        [""],
        ["ok", ""],
        [3],
        3,
        b"bytes",
        [b"bytes"],
        [None],
        {"a": 1},
        iter("a"),
        "\ud800",
        ["ok", "no\udfff"],
        np.array(3),
    ],
    "stop_token_ids": [
        [-1],
        [1.5],
        ["1"],
        [True],
        [None],
        3,
        "3",
        [[1]],
        np.array([[1]]),
        np.array([1.0]),
        {5: 1},
        itertools.count(),
    ],
    "ignore_eos": ["no", None, 2],
    "seed": [1.5, "1", True, [1], 2**63, -(2**63) - 1, 10**400],
    "top_k": [-2, 1.0, "5", None, True],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, "0.9", None, True],
    "min_p": [-0.01, 1.5, NAN, INF, "0", None],
    "repetition_penalty": [0, -1, NAN, INF, "1.1", None, 1e39, 1e-39],
    "presence_penalty": [-2.1, 2.1, NAN, "0", None],
    "frequency_penalty": [-2.1, 2.1, INF, [0.5], None],
    "logit_bias": [
        {-1: 1.0},
        {"5": 1.0},
        {5: 101},
        {5: -INF},
        {5: NAN},
        {5: None},
        [5],
        "5",
        5,
        {True: 1.0},
        {5: 10**400},
    ],
    "allowed_token_ids": [[], [-1], ["a"], [1.0], 5, "5"],
    "bad_words": ["word", [""], [3], 3, ["\ud800"], {"a": 1}],
    "min_tokens": [-1, 1.0, None, True, 17],
    "include_stop_str_in_output": [1, None, "yes"],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "logprob_token_ids": [[], [-1], "5", 5, list(range(129))],
    "prompt_logprobs": [-1, 21, 1.0, True, "5"],
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
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"n": 16384},
        {"temperature": 3.4e38},
        {"top_k": 2**62},
        {"stop_token_ids": range(3)},
        {"seed": None},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_p": 1},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: 100, 9: -100.0}},
        {"logit_bias": {}},
        {"allowed_token_ids": (3,)},
        {"bad_words": ("a", " b")},
        {"min_tokens": 16},
        {"min_tokens": 999, "max_tokens": None},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": 2, "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_valid_values_are_kept(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        kept = getattr(params, name)
        several = isinstance(value, (list, range))
        assert kept == (tuple(value) if several else value) or kept == (value,)


def test_a_value_that_python_does_not_spell_out_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^max_tokens must be .* of type int$"):
        SamplingParams(max_tokens=10**5000)
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(stop_token_ids=[*range(10**5), -1])
    assert len(str(caught.value)) < 400


def test_numpys_values_become_pythons() -> None:
    params = SamplingParams(
        n=np.int64(3),
        temperature=np.float32(0.5),
        seed=np.uint64(7),
        logit_bias={np.int32(4): np.float64(1.5)},
        stop_token_ids=np.array([1, 2], np.uint32),
        allowed_token_ids=np.array([3]),
    )
    plain = SamplingParams(
        n=3,
        temperature=0.5,
        seed=7,
        logit_bias={4: 1.5},
        stop_token_ids=[1, 2],
        allowed_token_ids=[3],
    )
    assert params == plain and repr(params) == repr(plain)


def test_seed_minus_one_is_none() -> None:
    """As in vLLM."""
    assert SamplingParams(seed=-1).seed is None


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


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    off = {
        **{"top_k": 0, "top_p": 1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1},
        **{"presence_penalty": 0, "frequency_penalty": 0, "include_stop_str_in_output": False},
        **{"logit_bias": None, "allowed_token_ids": None},
        **{"logprobs": None, "prompt_logprobs": None},
    }
    assert {name: getattr(params, name) for name in off} == off
    assert not params.bad_words and not params.penalizes


def test_min_tokens_beyond_max_tokens_names_both() -> None:
    message = r"min_tokens must be at most max_tokens \(5\) but got 6"
    with pytest.raises(InvalidParameterError, match=message):
        SamplingParams(max_tokens=5, min_tokens=6)


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "topk"])
def test_a_field_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_a_callers_bias_is_copied_and_params_hash() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}))
    assert params == SamplingParams(logit_bias={3: 1.0}) != SamplingParams(logit_bias={3: 2.0})
