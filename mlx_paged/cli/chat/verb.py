"""`mlx-paged chat`: its options, and the construction of the chat."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.cli.options import (
    AdapterPath,
    AsyncScheduling,
    CPUActivations,
    KVCacheDType,
    KVCacheMemory,
    Markup,
    MaxModelLen,
    MaxStepTime,
    Model,
    ModelDType,
    OffloadingOptions,
    PipelineParallelSize,
    SamplingOptions,
    Speculative,
    SystemPrompt,
    TensorParallelSize,
    given,
    option,
    refuse,
    with_options,
)
from mlx_paged.errors import MlxPagedError
from mlx_paged.extras import needs_extra

if TYPE_CHECKING:
    from mlx_paged.cli.chat.conversation import Backend, Conversation
    from mlx_paged.cli.chat.session import ChatSession
    from mlx_paged.cli.chat.tools import ChatTools

_TOOLS = "Tools of MCP servers"
_ONLY_LOCAL = (
    "dtype", "max_model_len", "kv_cache_memory", "kv_cache_dtype", "cpu_activations",
    "async_scheduling", "max_step_time_ms", "speculative_config", "adapter_path",
    "tensor_parallel_size", "pipeline_parallel_size", "kv_offloading_size", "kv_offload_dir",
    "kv_offload_gib",
)  # fmt: skip


@with_options()
def chat(
    *,
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Talk to a server with OpenAI's API instead of loading a model."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key for the server.", envvar="MLX_PAGED_API_KEY", show_envvar=True
        ),
    ] = None,
    system_prompt: SystemPrompt = None,
    load: Annotated[
        Path | None, typer.Option(help="Continue a chat written by /save.")
    ] = None,
    markup: Annotated[
        Markup,
        typer.Option(help="How to draw answers. auto: Markdown; code for the embedded model."),
    ] = "auto",
    history_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the input history.",
            show_default="~/.local/state/mlx-paged/chat-history",
            envvar="MLX_PAGED_HISTORY_FILE", show_envvar=True,
        ),
    ] = None,
    mcp: Annotated[
        Path | None,
        option(
            _TOOLS, "JSON file of MCP servers whose tools the model can call. You confirm "
            "each call.", metavar="CONFIG",
        ),
    ] = None,
    mcp_allow: Annotated[
        list[str] | None,
        option(
            _TOOLS, "Tool that runs without confirmation, as named by /tools. Repeatable.",
            metavar="TOOL",
        ),
    ] = None,
    max_tool_rounds: Annotated[
        int, option(_TOOLS, "Maximum answers with tool calls per message.", min=1)
    ] = 10,
    sampling: SamplingOptions,
    model: Model = None,
    dtype: ModelDType = "auto",
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KVCacheMemory = None,
    kv_cache_dtype: KVCacheDType = "auto",
    cpu_activations: CPUActivations = "float32",
    async_scheduling: AsyncScheduling = True,
    max_step_time_ms: MaxStepTime = None,
    speculative_config: Speculative = None,
    adapter_path: AdapterPath = None,
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
    offloading: OffloadingOptions,
) -> None:  # fmt: skip
    """Talk to a model in the terminal.

    Examples:
      mlx-paged chat
      mlx-paged chat --model mlx-community/Qwen3-0.6B-4bit --system-prompt "Be brief"
      mlx-paged chat --server http://127.0.0.1:8000 --temperature 0.2
      mlx-paged chat --mcp mcp.json --model mlx-community/Qwen3-4B-4bit
      printf 'Reverse a string\\n/stats\\n' | mlx-paged chat

    Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands. Each line of piped input is a
    message or a command: answers go to stdout, all else to stderr; exit status 1 if one failed.
    """
    if server is not None:
        refuse(context, _ONLY_LOCAL, "has no effect with --server")
    if mcp is None:
        refuse(context, ("mcp_allow", "max_tool_rounds"), "needs --mcp")
    conversation = _conversation(load, system_prompt, given(**vars(sampling)))
    tools = None if mcp is None else _tools(mcp, mcp_allow or [])
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        with needs_extra("chat", "a chat at a terminal"):
            import prompt_toolkit  # noqa: F401  (checked before the model is loaded)
    with typed_ahead() if at_terminal else contextlib.nullcontext():
        if server is None:
            sizes = given(
                max_model_len=max_model_len, kv_cache_memory=kv_cache_memory,
                max_step_time_ms=max_step_time_ms, speculative_config=speculative_config,
                adapter_path=adapter_path, **vars(offloading),
            )  # fmt: skip
            sizes["kv_cache_dtype"] = kv_cache_dtype
            sizes["cpu_activations"] = cpu_activations
            sizes["tensor_parallel_size"] = tensor_parallel_size
            sizes["pipeline_parallel_size"] = pipeline_parallel_size
            backend = _local(model, dtype=dtype, async_scheduling=async_scheduling, **sizes)
        else:
            backend = _remote(server, model, api_key)
        with contextlib.closing(backend), tools or contextlib.nullcontext():
            if tools is not None:
                backend.tools = tools.tools
            _converse(
                backend, conversation, markup, history_file, at_terminal,
                tools=tools, max_tool_rounds=max_tool_rounds,
            )  # fmt: skip


def _conversation(
    load: Path | None, system_prompt: str | None, params: dict[str, object]
) -> Conversation:
    """Loads or creates a chat; options of the command line override its settings."""
    from mlx_paged.cli.chat.conversation import Conversation

    conversation = Conversation() if load is None else Conversation.load(load)
    if system_prompt is not None:
        conversation.system = system_prompt
    for name, value in params.items():
        conversation.set_param(name, value)
    return conversation


def _tools(config: Path, allowed: list[str]) -> ChatTools:
    """Returns the tools of a configuration file, without starting their servers."""
    with needs_extra("mcp", "--mcp"):
        from mlx_paged.cli.chat.tools import ChatTools
        from mlx_paged.mcp import read_config
    return ChatTools(read_config(config), allowed)


def _local(model: str | None, **engine_options: object) -> Backend:
    from rich.console import Console

    from mlx_paged.server.config import default_model_name

    with Console(stderr=True).status("loading the model"):
        from mlx_paged.cli.chat.local import LocalBackend

        return LocalBackend(model, default_model_name(model), **engine_options)


def _remote(url: str, model: str | None, api_key: str | None) -> Backend:
    with needs_extra("chat", "--server"):
        from mlx_paged.cli.chat.remote import RemoteBackend
    keys = (api_key or "").split()  # The variable may contain several, for a server.
    return RemoteBackend(url, model, keys[0] if keys else None)


def _converse(
    backend: Backend,
    conversation: Conversation,
    markup: Markup,
    history_file: Path | None,
    at_terminal: bool,
    **options: Any,
) -> None:
    """Runs a chat; `options` are those of `ChatSession`."""
    from rich.console import Console

    from mlx_paged.cli.chat import render
    from mlx_paged.cli.chat.session import ChatSession, converse_lines
    from mlx_paged.server.config import default_model_name

    if not at_terminal:
        session = ChatSession(backend, render.PlainView(), conversation, **options)
        _note_tools(session)
        converse_lines(session, sys.stdin)
        if session.failed:
            raise MlxPagedError("not everything could be done: see above")
        return
    from mlx_paged.cli.chat import terminal

    if markup == "auto":
        markup = "code" if backend.model == default_model_name(None) else "markdown"
    view = render.TerminalView(Console(highlight=False), markup)
    session = ChatSession(backend, view, conversation, **options)
    _note_tools(session)
    terminal.converse(session, history_file or terminal.history_path())


def _note_tools(session: ChatSession) -> None:
    """Shows the number of tools, and errors of their servers."""
    tools = session.tools
    if tools is None:
        return
    session.view.note(f"{len(tools.listed)} tools of MCP servers; /tools lists them")
    for error in tools.errors:
        session.view.error(error)
    if getattr(session.backend, "describes_tools", False):
        session.view.note(
            "the model's chat template does not support tools: a system message describes them"
        )


@contextlib.contextmanager
def typed_ahead() -> Iterator[None]:
    """Preserves keys that are typed ahead of a prompt, without echoing them.

    The terminal would echo them into the output, and convert Enter to a line feed, which is another
    key at the prompt.
    """
    import termios

    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):
        yield
        return
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
