"""The engine on quantized pools: answers, exact sharing of prefixes, capacity, options."""

from __future__ import annotations

from typing import Any

import pytest
from support.embedded_llm import check_at_rest, make
from support.models import embedded
from support.reference import ON_GPU

from mlx_paged import SamplingParams
from mlx_paged.demo.prompts import CHATS, SYSTEM_PROMPT
from mlx_paged.engine.config import EngineConfig
from mlx_paged.errors import InvalidParameterError

PARAMS = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
Answer = tuple[list[int], list[dict[int, float]]]  # tokens, and log probabilities


def prompts() -> list[list[int]]:
    """Chats with and without a system prompt that most of them share."""
    tokenizer = embedded().tokenizer
    system = [{"role": "system", "content": SYSTEM_PROMPT[:700]}]
    made = []
    for i, chat in enumerate(CHATS[:6]):
        messages = [*(system if i % 3 else []), {"role": "user", "content": chat}]
        made.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return made


def answers(at_once: int = 6, **options: Any) -> list[Answer]:
    llm = make(**options)
    found = []
    for i in range(0, 6, at_once):
        for output in llm.generate(prompts()[i : i + at_once], PARAMS):
            [answer] = output.outputs
            logprobs = [{t: e.logprob for t, e in step.items()} for step in answer.logprobs]
            found.append((answer.token_ids, logprobs))
    check_at_rest(llm)
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0
    elif at_once == 1:
        assert llm.stats().counters.num_cached_tokens > 0
    return found


def test_greedy_answers_are_those_of_float_pools() -> None:
    found, expected = answers(kv_cache_dtype="int8"), answers()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


# However prompts are cut, shared, computed again and batched: to the last bit, on the CPU.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["int8", "int8_k_int4_v", "int4", "fp8"])
def test_answers_do_not_depend_on_the_steps(name) -> None:
    wanted = answers(kv_cache_dtype=name)
    for options in (
        {"at_once": 1},
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 24, "block_size": 16},
    ):
        found = answers(kv_cache_dtype=name, **options)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted], options
        assert ON_GPU or found == wanted, options


def test_pools_hold_more_tokens() -> None:
    sizes = {
        name: make(kv_cache_dtype=name, kv_cache_memory=1 << 22).stats().usage.num_usable_blocks
        for name in ("auto", "int8", "k8v4", "int4")
    }
    # (Of float32, as the CPU has it; a scale is 2 of 66 bytes.)
    assert sizes["int8"] > 3.8 * sizes["auto"]
    assert sizes["k8v4"] > 4.7 * sizes["auto"]
    assert sizes["int4"] > 6.2 * sizes["auto"]


def test_the_format_is_in_the_salt_of_prefixes() -> None:
    assert EngineConfig().salted(None) is None
    assert EngineConfig().salted("a") == "a"
    salts = {
        EngineConfig(kv_cache_dtype=name, kv_cache_dtype_skip_layers=skip).salted(salt)
        for name in ("int8", "int4")
        for skip in ((), (0,))
        for salt in (None, "a")
    }
    assert len(salts) == 8 and None not in salts


@pytest.mark.parametrize("salt", ["", 3])
def test_a_salt_is_still_checked(salt) -> None:
    llm = make(kv_cache_dtype="int8")
    with pytest.raises(InvalidParameterError, match="cache_salt must be None or a string"):
        llm.engine.add_request("r", [1, 2], PARAMS, cache_salt=salt)


def test_options_are_checked() -> None:
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype must be one of"):
        EngineConfig(kv_cache_dtype="int2")
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype_skip_layers must be"):
        EngineConfig(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["all"])
    with pytest.raises(InvalidParameterError, match="layers of the 6 that the model has"):
        make(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[6])
