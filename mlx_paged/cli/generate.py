"""`mlx-paged generate`: answers prompts, or a batch of requests in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_paged.cli.entry import ExitCode, deferred_interrupt
from mlx_paged.cli.options import (
    AdapterPath,
    AsyncScheduling,
    CPUActivations,
    KVCacheDType,
    KVCacheMemory,
    MaxModelLen,
    MaxNumSeqs,
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
    from mlx_paged.engine.llm import LLM
    from mlx_paged.engine.outputs import SequenceUpdate
    from mlx_paged.engine.sampling_params import SamplingParams

_BATCH = "Batch"
_STRUCTURED = "Structured outputs"
# Options that apply to a batch, whose lines contain everything else.
_BATCH_OPTIONS = frozenset(
    {"input", "output", "overwrite", "served_model_name", "model", "max_num_seqs",
     "runner", "dtype", "max_model_len", "kv_cache_memory", "kv_cache_dtype", "cpu_activations",
     "async_scheduling", "max_step_time_ms", "speculative_config", "adapter_path",
     "tensor_parallel_size", "pipeline_parallel_size", "kv_offloading_size", "kv_offload_dir",
     "kv_offload_gib", "progress"}
)  # fmt: skip
_ONLY_BATCH = ("output", "overwrite", "served_model_name", "runner")
_GREEDY = SamplingOptions(
    max_tokens=256,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_tokens=0,
)


@dataclass(frozen=True)
class StructuredOptions:
    """Constraints on the output. These options are mutually exclusive."""

    json_schema: Annotated[
        Path | None, option(_STRUCTURED, "File with a JSON schema for answers.")
    ] = None
    json_object: Annotated[
        bool, option(_STRUCTURED, "Answer with JSON objects.", "--json-object")
    ] = False
    regex: Annotated[
        str | None, option(_STRUCTURED, "Regular expression that answers fully match.")
    ] = None
    choice: Annotated[list[str] | None, option(_STRUCTURED, "A possible answer. Repeatable.")] = (
        None
    )
    grammar: Annotated[
        Path | None, option(_STRUCTURED, "File with a Lark or GBNF grammar for answers.")
    ] = None


@with_options()
def generate(
    *,
    context: typer.Context,
    text: Annotated[
        str | None, typer.Argument(help="Prompt.", show_default="stdin")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Another prompt. Repeatable.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="File with a prompt; '-': stdin. Repeatable."),
    ] = None,
    system_prompt: SystemPrompt = None,
    ignore_chat_template: Annotated[
        bool,
        typer.Option(
            "--ignore-chat-template",
            help="Complete the prompt itself, without the chat template.",
        ),
    ] = False,
    n: Annotated[int, typer.Option("-n", min=1, help="Answers per prompt.")] = 1,
    progress: Annotated[
        bool | None,
        typer.Option(help="Show a progress bar on stderr.", show_default="on a terminal"),
    ] = None,
    input: Annotated[
        Path | None,
        option(_BATCH, "JSONL file of requests in OpenAI's batch format; '-': stdin.",
               "--input", "-i"),
    ] = None,
    output: Annotated[
        Path | None,
        option(_BATCH, "JSONL file for answers. Requests that it already answers are "
               "skipped.",
               "--output", "-o", show_default="stdout"),
    ] = None,
    overwrite: Annotated[
        bool, option(_BATCH, "Empty the output file first.", "--overwrite")
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        option(_BATCH, "Model name that lines may use. Repeatable; answers use the first.",
               show_default="the model's path or id"),
    ] = None,
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        option(_BATCH, "generate text, or embed and score it (pooling). auto: pooling for "
               "models whose files configure it."),
    ] = "auto",
    sampling: SamplingOptions = _GREEDY,
    structured: StructuredOptions,
    model: Model = None,
    dtype: ModelDType = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
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
    """Answer prompts, or the requests of a batch file, many at once.

    Examples:
      mlx-paged generate "Return the n-th Fibonacci number"
      mlx-paged generate -p "Hello" -p "How are you?" --model mlx-community/Qwen3-0.6B-4bit
      mlx-paged generate "Name a color" --choice red --choice green
      git diff | mlx-paged generate --system-prompt "Review this change"
      mlx-paged generate -f question.txt --temperature 0.7 --seed 1 -n 3
      mlx-paged generate -i requests.jsonl -o answers.jsonl

    The last one runs a batch in OpenAI's format. If it is interrupted, the same command continues
    where it stopped. Exit status 3 if some of its lines failed, 1 if all did.
    """
    engine_options = {
        "max_num_seqs": max_num_seqs,
        "async_scheduling": async_scheduling,
        "kv_cache_dtype": kv_cache_dtype,
        "cpu_activations": cpu_activations,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        **given(
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            max_step_time_ms=max_step_time_ms,
            speculative_config=speculative_config,
            adapter_path=adapter_path,
            **vars(offloading),
        ),
    }
    if input is not None:
        others = context.params.keys() - _BATCH_OPTIONS
        refuse(context, others, "has no effect with --input: the lines specify it")
        with needs_extra("server", "a batch"):
            from mlx_paged.cli import batch
        num_failed = batch.run(
            batch.Batch(
                _unless_dash(input),
                None if output is None else _unless_dash(output),
                overwrite,
                model,
                tuple(served_model_name or ()),
                progress,
                {**engine_options, "runner": runner},
                dtype,
            )
        )
        if num_failed:
            raise typer.Exit(ExitCode.INCOMPLETE)
        return
    refuse(context, _ONLY_BATCH, "needs --input: it applies to batches")
    given_prompts = [*([] if text is None else [text]), *(prompt or [])]
    prompts = _prompts(context, given_prompts, file or [], keep_breaks=ignore_chat_template)
    from mlx_paged.cli.progress import loading_bar

    with loading_bar(2, shown=progress) as begin:
        begin("libraries")
        from mlx_paged.engine.llm import LLM
        from mlx_paged.engine.sampling_params import SamplingParams

        params = SamplingParams(
            n=n, structured_outputs=_structured_outputs(structured), **given(**vars(sampling))
        )
        begin("model")
        llm = LLM(model, dtype=dtype, on_kernel=partial(begin, "kernels"), **engine_options)
    _answer(llm, prompts, params, system_prompt, chat=not ignore_chat_template, progress=progress)


def _prompts(
    context: typer.Context, prompts: list[str], files: list[Path], *, keep_breaks: bool
) -> list[str]:
    """Returns the prompts of the command line and of the files, or else of stdin."""
    if not prompts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            context.fail("there is no prompt: give a text, --file or --input, or pipe in a text")
        files = [Path("-")]
    return [*prompts, *(_read(_unless_dash(path), keep_breaks) for path in files)]


def _structured_outputs(options: StructuredOptions) -> dict[str, Any] | None:
    """Returns the fields of `StructuredOutputs`, which validates them; None without constraints."""
    return (
        given(
            json=None if options.json_schema is None else _read(options.json_schema, True),
            json_object=options.json_object or None,
            regex=options.regex,
            choice=options.choice,
            grammar=None if options.grammar is None else _read(options.grammar, True),
        )
        or None
    )


def _read(path: Path | None, keep_break: bool) -> str:
    name = "stdin" if path is None else str(path)
    try:
        text = (sys.stdin.buffer.read() if path is None else path.read_bytes()).decode()
    except OSError as error:
        raise MlxPagedError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MlxPagedError(f"{name} must be UTF-8 text ({error.reason})") from error
    text = text if keep_break else text.rstrip("\r\n")
    if not text:
        raise MlxPagedError(f"{name} is empty")
    return text


def _unless_dash(path: Path) -> Path | None:
    return None if str(path) == "-" else path


def _answer(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    system_prompt: str | None,
    *,
    chat: bool,
    progress: bool | None,
) -> None:
    """Prints answers: a single one as it arrives, several in order once all are done."""
    from rich.console import Console
    from rich.rule import Rule

    from mlx_paged.cli.progress import progress_bar

    inputs: list[str] | list[list[int]] = prompts
    if chat and llm.tokenizer.has_chat_template:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        inputs = llm.render_chats([[*system, {"role": "user", "content": p}] for p in prompts])

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if len(prompts) == 1 and params.n == 1:
        for update in _stream(llm, inputs, params):
            console.print(update.text, end="")
        console.print()
        return
    texts: dict[tuple[int, int], list[str]] = {}
    with progress_bar("answers", len(prompts) * params.n, shown=progress) as advance:
        for update in _stream(llm, inputs, params):
            texts.setdefault((int(update.request_id), update.index), []).append(update.text)
            if update.finish_reason is not None:
                advance()
    for (prompt_index, index), pieces in sorted(texts.items()):
        title = prompts[prompt_index]
        if params.n > 1:
            title += f" [{index + 1}/{params.n}]"
        console.print(Rule(title, align="left"))
        console.print("".join(pieces))


def _stream(
    llm: LLM, inputs: list[str] | list[list[int]], params: SamplingParams
) -> Iterator[SequenceUpdate]:
    """Runs `LLM.stream`; Ctrl-C ends it between two steps."""
    with deferred_interrupt() as interrupted:
        for update in llm.stream(inputs, params):
            yield update
            if interrupted.is_set():
                raise KeyboardInterrupt
