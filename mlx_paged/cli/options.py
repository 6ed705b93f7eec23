"""Options of the verbs: option groups, options that verbs share, and option files."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

ENV_PREFIX = "MLX_PAGED"
ENGINE = "Model and engine"
_SAMPLING = "Sampling"

DType = Literal["auto", "float32", "float16", "bfloat16"]
#: How a chat renders answers.
Markup = Literal["auto", "markdown", "code", "plain"]


def option(panel: str | None, help: str, *names: str, **more: Any) -> Any:
    """Declares an option under a heading of ``--help``.

    Args:
        names: Flags; by default one made of the parameter's name.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def with_options(*, environment: bool = False) -> Callable[[Callable[..., None]], Any]:
    """Lets a verb take groups of options, each as one parameter.

    A group is a dataclass whose fields are annotated like parameters of a verb. Typer sees the
    fields instead of the parameter. The default of the parameter is a group with the verb's own
    defaults; without one, those of the fields apply.

    Args:
        environment: Let an environment variable, named after its flag, set each option of a group.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(verb, eval_str=True).parameters.values():
            if is_dataclass(each.annotation):
                group: Any = each.annotation
                groups[each.name] = group
                default = group() if each.default is each.empty else each.default
                parameters += _parameters(default, environment)
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(verb)
        def with_groups(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
            verb(**given)

        with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_groups.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_groups

    return decorate


def _parameters(group: Any, environment: bool) -> list[inspect.Parameter]:
    """Returns a parameter for each field of a group, with its value as the default."""
    made = []
    for name, hint in get_type_hints(type(group), include_extras=True).items():
        kind, info = hint.__origin__, copy(hint.__metadata__[0])
        if environment:
            flag = info.default if isinstance(info.default, str) else name
            variable = flag.partition("/")[0].removeprefix("--").replace("-", "_")
            variable = variable.replace(".", "_").upper()
            if info.envvar is None:
                info.envvar, info.show_envvar = f"{ENV_PREFIX}_{variable}", False
        made.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(group, name),
                annotation=Annotated[kind, info],
            )
        )
    return made


def spread_values(arguments: Sequence[str]) -> list[str]:
    """Repeats ``--lora-modules`` before each of its values, since vLLM takes several after one."""
    flag, spread = "--lora-modules", list[str]()
    follows = False
    for argument in arguments:
        is_value = argument.startswith("{") or "=" in argument.lstrip("-")
        if follows and is_value and not argument.startswith("-"):
            if spread[-1] != flag:
                spread.append(flag)
        else:
            follows = argument == flag
        spread.append(argument)
    return spread


def fields_of(kind: type, options: Any) -> dict[str, Any]:
    """Returns the values of the options that are also fields of a dataclass, by name."""
    names = [f.name for f in fields(kind) if hasattr(options, f.name)]
    return {name: getattr(options, name) for name in names}


def given(**values: Any) -> dict[str, Any]:
    """Returns the options that have a value, by name."""
    return {name: value for name, value in values.items() if value not in (None, [])}


def refuse(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuses options if they were given on the command line.

    Raises:
        typer.BadParameter: With the reason.
    """
    for name in sorted(set(context.params).intersection(names)):
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            [found] = [p for p in context.command.params if p.name == name]
            flag = found.opts[0] if found.param_type_name == "option" else name.upper()
            raise typer.BadParameter(reason, param_hint=flag)


# --- Options that several verbs share -------------------------------------------------------------

Model = Annotated[
    str | None,
    option(
        ENGINE, "Model directory, GGUF file or Hugging Face id.", show_default="the embedded model"
    ),
]
MaxModelLen = Annotated[
    int | None,
    option(
        ENGINE,
        "Maximum tokens of prompt and answer together.",
        min=1,
        show_default="the model's own limit",
    ),
]
MaxNumSeqs = Annotated[int, option(ENGINE, "Maximum sequences that run at once.", min=1)]
KVCacheMemory = Annotated[
    int | None,
    option(
        ENGINE, "Bytes for the KV cache.", "--kv-cache-memory", min=1, show_default="from memory"
    ),
]


def follow_first(size: int) -> int:
    """Under `mlx.launch`, makes all processes but the first follow that one, and never return."""
    if size > 1 and os.environ.get("MLX_RANK", "0") != "0":
        from mlx_paged.engine.ranks.start import follow_if_launched

        follow_if_launched(size)
    return size


RANKS_HELP = "Divide every layer among this many devices. docs/distributed.md"
TensorParallelSize = Annotated[
    int,
    option(ENGINE, RANKS_HELP, "--tensor-parallel-size", "-tp", min=1, callback=follow_first),
]
STAGES_HELP = "Give each of this many devices some of the layers, which saves memory, not time."
PipelineParallelSize = Annotated[
    int,
    option(ENGINE, STAGES_HELP, "--pipeline-parallel-size", "-pp", min=1, callback=follow_first),
]
DTYPE_HELP = "Data type of the weights. auto: as stored, float32 on the CPU."
ModelDType = Annotated[DType, option(ENGINE, DTYPE_HELP)]
# Changes of a real model's perplexity: bench/results/kv_quality-smollm2*.json.
KV_CACHE_DTYPE_HELP = (
    "KV cache format: auto (the model's own), int8 (almost no loss), int8_k_int4_v or k8v4 (a real "
    "model's perplexity +0.5%), fp8 (+0.6% to +1.7%) or int4 (+5%). All but auto hold two to three "
    "times the tokens."
)
KVCacheDType = Annotated[str, option(ENGINE, KV_CACHE_DTYPE_HELP, "--kv-cache-dtype")]
CPUActivations = Annotated[
    str,
    option(
        ENGINE,
        "CPU only: format of the inputs of linear layers: float32 (exact), int8 (for 4-bit and "
        "8-bit weights) or bfloat16 (for bfloat16 weights, in prompts). The last two are faster "
        "and less exact.",
        "--cpu-activations",
    ),
]
AsyncScheduling = Annotated[
    bool,
    option(
        ENGINE,
        "Schedule the next step while the current one runs. The tokens are the same.",
        "--async-scheduling/--no-async-scheduling",
    ),
]
MAX_STEP_TIME_HELP = (
    "Milliseconds that a step with prompts should take at most, so that the screen stays smooth. "
    "0: no limit."
)
MAX_STEP_TIME_DEFAULT = "50 on Metal, 0 elsewhere"
MaxStepTime = Annotated[
    float | None,
    option(ENGINE, MAX_STEP_TIME_HELP, "--max-step-time-ms", show_default=MAX_STEP_TIME_DEFAULT),
]
OFFLOADING_HELP = (
    "GiB of host memory for KV blocks that leave the cache. A prompt whose prefix is there does "
    "not compute it again. docs/kv-offloading.md"
)
OFFLOAD_DIR_HELP = (
    "Folder for KV blocks of long or repeated prompts, which come back after a restart, too. "
    "Prompts can be reconstructed from its files. docs/kv-offloading.md"
)
OFFLOAD_GIB_HELP = "GiB of all files in --kv-offload-dir."
SPECULATIVE_HELP = (
    'Draft tokens and verify several in one step, as a JSON object: {"method": "suffix"}, '
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4} or '
    '{"method": "draft_model", "model": ...}. The tokens are the same. docs/speculation.md'
)
Speculative = Annotated[
    str | None,
    option(ENGINE, SPECULATIVE_HELP, "--speculative-config", show_default="none"),
]

AdapterPath = Annotated[
    Path | None,
    option(
        ENGINE,
        "Directory of a LoRA adapter for all answers, in mlx-lm's or PEFT's format. docs/lora.md",
        "--adapter-path",
        show_default="none",
    ),
]


@dataclass(frozen=True)
class OffloadingOptions:
    """Where to keep KV blocks that leave the cache; fields of `EngineConfig`."""

    kv_offloading_size: Annotated[
        float | None, option(ENGINE, OFFLOADING_HELP, show_default="none")
    ] = None
    kv_offload_dir: Annotated[str | None, option(ENGINE, OFFLOAD_DIR_HELP, show_default="none")] = (
        None
    )
    kv_offload_gib: Annotated[float, option(ENGINE, OFFLOAD_GIB_HELP)] = 32.0


SystemPrompt = Annotated[str | None, option(None, "System message.")]
MaxTokens = Annotated[int | None, option(_SAMPLING, "Maximum tokens of an answer.", min=1)]


@dataclass(frozen=True)
class SamplingOptions:
    """Fields of `SamplingParams`; None: not given."""

    max_tokens: MaxTokens = None
    temperature: Annotated[float | None, option(_SAMPLING, "0 is greedy.", min=0.0)] = None
    top_k: Annotated[
        int | None, option(_SAMPLING, "Sample from the k likeliest tokens. 0: all.")
    ] = None
    top_p: Annotated[
        float | None,
        option(_SAMPLING, "Sample from the likeliest tokens that reach this probability."),
    ] = None
    min_p: Annotated[
        float | None,
        option(_SAMPLING, "Drop tokens below this share of the likeliest token's probability."),
    ] = None
    repetition_penalty: Annotated[
        float | None, option(_SAMPLING, "Above 1 discourages repeats.")
    ] = None
    presence_penalty: Annotated[
        float | None, option(_SAMPLING, "Subtract this from the logits of used tokens.")
    ] = None
    frequency_penalty: Annotated[float | None, option(_SAMPLING, "Subtract this once per use.")] = (
        None
    )
    min_tokens: Annotated[int | None, option(_SAMPLING, "Minimum tokens of an answer.")] = None
    seed: Annotated[int | None, option(_SAMPLING, "Make sampled answers repeatable.")] = None
    stop: Annotated[
        list[str] | None, option(_SAMPLING, "Text that ends an answer. Repeatable.")
    ] = None


# --- Files of options -----------------------------------------------------------------------------


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes a YAML file's entries the defaults; the command line and environment override them."""
    if path is None:
        return None
    import yaml

    try:
        entries = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise typer.BadParameter(f"{path} must hold options as `name: value`")
    defaults: dict[str, Any] = {}
    for parameter, value in _values(context, str(path), entries):
        if parameter.name == "config":
            raise typer.BadParameter(f"{path}: there is no option 'config'")
        defaults[parameter.name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def option_values(
    context: typer.Context, where: str, entries: Mapping[Any, Any], names: Collection[str]
) -> dict[str, Any]:
    """Converts options in a file as if they were on the command line.

    Args:
        where: Location of the entries, for errors.
        entries: Values by name, in any spelling that an option file may have.
        names: The allowed parameters.

    Raises:
        typer.BadParameter: An unknown option, or an invalid value.
    """
    found: dict[str, Any] = {}
    for parameter, value in _values(context, where, entries):
        if parameter.name not in names:
            raise typer.BadParameter(f"{where}: {parameter.name} is not an option of a model")
        try:
            found[parameter.name] = parameter.process_value(context, value)
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{where}.{parameter.name}: {error.message}") from error
    return found


def _values(
    context: typer.Context, where: str, entries: Mapping[Any, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yields the parameters that a file sets, with values in the form of the command line."""
    parameters = _by_name(context.command)
    for key, value in entries.items():
        found, is_negated = parameters.get(str(key).replace("-", "_"), (None, False))
        if found is None:
            raise typer.BadParameter(f"{where}: there is no option {key!r}")
        if is_negated:
            if not isinstance(value, bool):
                raise typer.BadParameter(f"{where}: {key} must be true or false but is {value!r}")
            yield found, not value
        elif isinstance(value, dict):
            yield found, json.dumps(value)  # The command line takes mappings as JSON.
        elif isinstance(value, (list, tuple)):
            yield found, [json.dumps(v) if isinstance(v, dict) else str(v) for v in value]
        else:
            several = getattr(found, "multiple", False)
            yield found, [str(value)] if several else value


def _by_name(command: Any) -> dict[str, tuple[Any, bool]]:
    """Returns a command's parameters by each of their names, and True for negated names."""
    found: dict[str, tuple[Any, bool]] = {}
    # Arguments last: `model` is the argument of `serve`, not its option of that name.
    for parameter in sorted(command.params, key=lambda p: p.param_type_name == "argument"):
        for names, is_negated in ((parameter.opts, False), (parameter.secondary_opts, True)):
            for name in names:
                found[name.lstrip("-").replace("-", "_")] = parameter, is_negated
        found[parameter.name] = parameter, False
    return found
