"""The embedded model writes the same tokens through the simulated kernels as on the CPU."""

from __future__ import annotations

from support.simulated import launches, needs_simulator, simulated

from mlx_paged import LLM, SamplingParams

PROMPTS = [
    "Return the sum of two numbers.",
    "Return the largest item of a list.",
    "Check whether a string is a palindrome.",
]


def generate() -> list[tuple[int, ...]]:
    # A small pool: the simulator keeps a shadow of all memory that a kernel may touch.
    llm = LLM(num_gpu_blocks_override=16)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@needs_simulator
def test_three_concurrent_prompts_give_the_cpu_tokens() -> None:
    expected = generate()
    assert [len(tokens) for tokens in expected] == [32, 32, 32]
    with simulated():
        tokens = generate()
        ran = {launch["kernel"] for launch in launches()}
    assert tokens == expected
    assert {"write_kv", "paged_decode_float32_64_64_q3"} <= ran
