"""`mlx-paged`: the entry point. Verbs are imported when called, so that `--help` is instant."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlx_paged import __version__, unpatch
from mlx_paged.cli.bench import bench
from mlx_paged.cli.doctor import doctor
from mlx_paged.cli.serve import serve
from mlx_paged.errors import MlxPagedError

app = typer.Typer(
    name="mlx-paged",
    help="Paged attention, prefix sharing and continuous batching for MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Option(help="Model directory or Hugging Face id.", show_default="the embedded model"),
]

AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan and launch a step while the one before it still runs; the tokens are the same.",
    ),
]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def generate(
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="What to answer. Repeat it for a batch.")
    ],
    model: Model = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest that sum to this.")] = 1,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest one's chance.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repeats.")] = 1,
    presence_penalty: Annotated[float, typer.Option(help="Off the logits of tokens used.")] = 0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each use.")] = 0,
    min_tokens: Annotated[int, typer.Option(help="Least tokens of an answer.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends an answer. Repeatable.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Answers for each prompt.")] = 1,
    async_scheduling: AsyncScheduling = True,
    ignore_chat_template: Annotated[
        bool, typer.Option(help="Complete the prompt as it is, without the chat template.")
    ] = False,
) -> None:
    """Answer prompts, all at once.

    Example: mlx-paged generate --prompt "Return the n-th Fibonacci number"
    """
    from mlx_paged.cli import generate as verb
    from mlx_paged.engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
    )
    verb.run(
        prompt,
        params,
        model,
        system_prompt,
        chat=not ignore_chat_template,
        async_scheduling=async_scheduling,
    )


app.command()(serve)
app.command()(doctor)
app.add_typer(bench, name="bench")


@app.command()
def demo(
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 160,
    compare: Annotated[
        bool, typer.Option(help="Do the same work with mlx-lm, and compare tokens and time.")
    ] = True,
    async_scheduling: AsyncScheduling = True,
) -> None:
    """Answer eight chats at once that share a long system prompt, and show what that saved."""
    from mlx_paged.cli import demo as verb

    verb.run(model, max_tokens, compare, async_scheduling=async_scheduling)


def main() -> None:
    """Runs the command line; errors of ours are one line on stderr and exit status 1."""
    unpatch()  # the engine needs no paged mlx-lm, and comparisons are with mlx-lm as it is
    try:
        app()
    except MlxPagedError as error:
        print(f"mlx-paged: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
