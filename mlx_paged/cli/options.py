"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

_SAMPLING = "Sampling"
_ENGINE = "Model and engine"

Model = Annotated[
    str | None,
    typer.Option(
        help="Model directory or Hugging Face id.",
        show_default="the embedded model",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most tokens of prompt and answer.",
        show_default="what the model was made for",
        rich_help_panel=_ENGINE,
    ),
]
KVCacheMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory",
        min=1,
        help="Bytes of the KV cache.",
        show_default="from memory",
        rich_help_panel=_ENGINE,
    ),
]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan and launch a step while the one before it still runs; the tokens are the same.",
        rich_help_panel=_ENGINE,
    ),
]

SystemPrompt = Annotated[str | None, typer.Option(help="System message of the chat.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample among the k likeliest; 0: all.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample among the likeliest that sum to this.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Least share of the likeliest one's chance.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 discourages repeats.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Off the logits of tokens used.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same for each use.", rich_help_panel=_SAMPLING)
]
MinTokens = Annotated[
    int | None, typer.Option(help="Least tokens of an answer.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Makes sampled answers repeatable.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Ends an answer. Repeatable.", rich_help_panel=_SAMPLING),
]


def given(**values: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in values.items() if value not in (None, [])}


def on_command_line(context: typer.Context) -> list[str]:
    """The parameters that were written, not left at their defaults."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, source in sources if getattr(source, "name", "") == "COMMANDLINE"]


def refuse(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuses options that mean nothing beside others, rather than ignoring them."""
    for name in set(on_command_line(context)).intersection(names):
        [flag] = [p.opts[0] for p in context.command.params if p.name == name]
        raise typer.BadParameter(reason, param_hint=flag)
