"""The options of `mlx-paged chat`, and what they put together."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_paged.cli import options
from mlx_paged.cli.chat.keys import typed_ahead
from mlx_paged.cli.chat.markup import Markup
from mlx_paged.cli.entry import needs_extra
from mlx_paged.errors import MlxPagedError

if TYPE_CHECKING:
    from mlx_paged.cli.chat.backend import Backend
    from mlx_paged.cli.chat.conversation import Conversation

_ONLY_LOCAL = ("max_model_len", "kv_cache_memory", "async_scheduling")


def chat(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Talk to a server with OpenAI's API, instead of loading a model."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that the server needs.", envvar="MLX_PAGED_API_KEY", show_envvar=True
        ),
    ] = None,
    system_prompt: options.SystemPrompt = None,
    load: Annotated[
        Path | None, typer.Option(help="Go on with a chat that /save has written.")
    ] = None,
    markup: Annotated[
        Markup,
        typer.Option(help="How answers are drawn; auto: Markdown, code for the embedded model."),
    ] = Markup.AUTO,
    history_file: Annotated[
        Path | None,
        typer.Option(
            help="What was typed before.", show_default="~/.local/state/mlx-paged/chat-history",
            envvar="MLX_PAGED_HISTORY_FILE", show_envvar=True,
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    model: options.Model = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KVCacheMemory = None,
    async_scheduling: options.AsyncScheduling = True,
) -> None:  # fmt: skip
    """Talk to a model in the terminal.

    Examples:
      mlx-paged chat
      mlx-paged chat --model mlx-community/Qwen3-0.6B-4bit --system-prompt "Be brief"
      mlx-paged chat --server http://127.0.0.1:8000 --temperature 0.2
      printf 'Reverse a string\\n/stats\\n' | mlx-paged chat

    Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands. Piped in, each line is a message
    or a command: answers go to stdout, all else to stderr, and the exit status is 1 if one failed.
    """
    params = options.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        seed=seed,
        stop=stop,
    )
    if server is not None:
        options.refuse(context, _ONLY_LOCAL, "it has no use with --server")
    conversation = _conversation(load, system_prompt, params)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with needs_extra("chat", "a chat at a terminal"):
            import prompt_toolkit  # noqa: F401  (told before the model is loaded)
    with typed_ahead() if at_terminal else contextlib.nullcontext():
        if server is None:
            backend = _local(
                model,
                async_scheduling=async_scheduling,
                **options.given(max_model_len=max_model_len, kv_cache_memory=kv_cache_memory),
            )
        else:
            backend = _remote(server, model, api_key)
        with contextlib.closing(backend):
            _converse(backend, conversation, markup, history_file, at_terminal)


def _conversation(
    load: Path | None, system_prompt: str | None, params: dict[str, object]
) -> Conversation:
    """What the command line says goes before what a saved chat says."""
    from mlx_paged.cli.chat.conversation import Conversation

    conversation = Conversation() if load is None else Conversation.load(load)
    if system_prompt is not None:
        conversation.system = system_prompt
    for name, value in params.items():
        conversation.set_param(name, value)
    return conversation


def _local(model: str | None, **engine_options: object) -> Backend:
    from rich.console import Console

    from mlx_paged.server.config import default_model_name

    with Console(stderr=True).status("loading the model"):
        from mlx_paged.cli.chat.local import LocalBackend

        return LocalBackend(model, default_model_name(model), **engine_options)


def _remote(url: str, model: str | None, api_key: str | None) -> Backend:
    with needs_extra("chat", "--server"):
        from mlx_paged.cli.chat.remote import RemoteBackend
    keys = (api_key or "").split()  # (the variable may hold several, for a server)
    return RemoteBackend(url, model, keys[0] if keys else None)


def _converse(
    backend: Backend,
    conversation: Conversation,
    markup: Markup,
    history_file: Path | None,
    at_terminal: bool,
) -> None:
    from rich.console import Console

    from mlx_paged.cli.chat import piped, views
    from mlx_paged.cli.chat.session import ChatSession
    from mlx_paged.server.config import default_model_name

    if not at_terminal:
        session = ChatSession(backend, views.PlainView(), conversation)
        piped.converse(session, sys.stdin)
        if session.failed:
            raise MlxPagedError("not everything could be done: see above")
        return
    from mlx_paged.cli.chat import terminal

    if markup is Markup.AUTO:
        embedded = backend.model == default_model_name(None)
        markup = Markup.CODE if embedded else Markup.MARKDOWN
    view = views.TerminalView(Console(highlight=False), markup)
    terminal.converse(
        ChatSession(backend, view, conversation), history_file or terminal.history_path()
    )
