"""The embedded model writes the same tokens through the simulated kernels as on the CPU."""

from __future__ import annotations

from unittest import mock

from support.simulated import launches, needs_simulator, sim_ext, simulated

from mlx_paged import LLM, SamplingParams
from mlx_paged.model.prepare import prepare_kernels

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


@needs_simulator
def test_a_request_meets_no_kernel_that_is_not_compiled() -> None:
    """On a Mac a kernel takes a part of a second to compile, once: at the start."""
    prepared: list[tuple[str, tuple[bool, ...]]] = []
    told: list[tuple[int, int]] = []
    sim_ext.forget_attention_layers()  # of other tests
    with simulated():
        prepare = lambda name, constants: prepared.append((name, constants))  # noqa: E731
        with mock.patch.object(sim_ext, "prepare_pipeline", prepare):
            llm = LLM(
                num_gpu_blocks_override=40,
                max_num_batched_tokens=64,
                on_kernel=lambda done, total: told.append((done, total)),
            )
            assert not launches()  # nothing was run for it
            assert told == [(i, len(prepared)) for i in range(len(prepared) + 1)]
            shared = list(range(5, 75))
            greedy = {"temperature": 0, "ignore_eos": True}
            llm.generate([[7], shared, [*shared, 9]], SamplingParams(max_tokens=3, **greedy))
            llm.generate([[*shared, *range(9)]], SamplingParams(max_tokens=2, logprobs=2, **greedy))
            llm.generate([shared[:33]], SamplingParams(n=3, seed=1, max_tokens=3))
            ran = {(launch["kernel"], launch["function_constants"]) for launch in launches()}
            # The graph of one step is enough to know the layers.
            sim_ext.forget_attention_layers()
            assert prepare_kernels(llm.engine._runner.model) == len(prepared) // 2
    assert ran <= set(prepared), ran - set(prepared)
    names = {name.split("_float32")[0] for name, _ in ran}
    assert {"paged_decode", "paged_prefill", "copy_blocks", "write_kv"} <= names
    assert len(prepared) == 2 * len(set(prepared)) < 60
