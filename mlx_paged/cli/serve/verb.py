"""`mlx-paged serve`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mlx_paged.cli.options import ENV_PREFIX, read_config, with_options
from mlx_paged.cli.serve.model_options import ModelOptions
from mlx_paged.cli.serve.models import models_of, refuse_alone
from mlx_paged.cli.serve.one_model import OneModel
from mlx_paged.cli.serve.run_several import run_several
from mlx_paged.cli.serve.server_options import ServerOptions
from mlx_paged.cli.serve.several_options import SeveralOptions
from mlx_paged.extras import needs_extra


@with_options(environment=True)
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory, GGUF file or Hugging Face id.",
            show_default="the embedded model",
            envvar=f"{ENV_PREFIX}_MODEL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with any of these options. The command line and the environment "
            "override it.",
            is_eager=True,
            callback=read_config,
            exists=True,
            dir_okay=False,
            envvar=f"{ENV_PREFIX}_CONFIG",
        ),
    ] = None,
    options: ModelOptions,
    server: ServerOptions,
    several: SeveralOptions,
    context: typer.Context,
) -> None:
    """Serve one or several models with OpenAI's and Anthropic's APIs and a chat page.

    Examples:
      mlx-paged serve
      mlx-paged serve mlx-community/Qwen3-0.6B-4bit --port 9000 --api-key secret
      mlx-paged serve mlx-community/Qwen3-8B-4bit --model small=mlx-community/Qwen3-0.6B-4bit
      MLX_PAGED_MAX_NUM_SEQS=64 mlx-paged serve --config serve.yaml

    Every option can be set in the environment: --max-num-seqs is MLX_PAGED_MAX_NUM_SEQS there,
    and several values are separated by spaces.
    """
    with needs_extra("server", "the server"):
        from mlx_paged.server import logs, run  # noqa: F401
    logs.configure(server.log_level, server.log_format, server.log_config)
    with logs.last_line(server.log_format):
        models = models_of(context, model, options, several)
        if len(models) == 1:
            refuse_alone(several)
        if len(models) > 1 or models[0].options.data_parallel_size > 1:
            status = run_several(models, server, several)
        else:
            [only] = models
            named = replace(only.options, served_model_names=list(only.names) or None)
            status = OneModel.of(only.model, named, server).run(server)
    sys.exit(status)
