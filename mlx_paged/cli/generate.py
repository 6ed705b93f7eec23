"""`mlx-paged generate`."""

from __future__ import annotations

from rich.console import Console
from rich.rule import Rule

from mlx_paged.engine.llm import LLM
from mlx_paged.engine.sampling_params import SamplingParams


def run(
    prompts: list[str],
    params: SamplingParams,
    model: str | None,
    system_prompt: str | None,
    *,
    chat: bool,
    async_scheduling: bool = True,
) -> None:
    """Answers prompts: one as it comes, several when they are done, in order."""
    llm = LLM(model, async_scheduling=async_scheduling)
    inputs: list[str] | list[list[int]] = prompts
    if chat and llm.tokenizer.has_chat_template:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        inputs = llm.render_chats([[*system, {"role": "user", "content": p}] for p in prompts])

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if len(prompts) == 1 and params.n == 1:
        for update in llm.stream(inputs, params):
            console.print(update.text, end="")
        console.print()
        return
    for prompt, output in zip(prompts, llm.generate(inputs, params)):
        for completion in output.outputs:
            title = prompt if params.n == 1 else f"{prompt} [{completion.index + 1}/{params.n}]"
            console.print(Rule(title, align="left"))
            console.print(completion.text)
