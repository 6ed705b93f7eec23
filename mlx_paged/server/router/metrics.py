"""Merges the Prometheus metrics of several processes: of different models, and of replicas.

Works on the lines of the text format, as this package's processes write it. The router streams on
the same event loop: parsing every sample into objects stalled all streams for 50 to 90 ms.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_VALUE = r'[^"\\]*(?:\\.[^"\\]*)*'
# Group 1 is the value of the label `model_name`, a name that other values may contain.
_MODEL_NAME = re.compile(rf'[^{{]*{{(?:\w+="{_VALUE}",)*?model_name="({_VALUE})"')
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
# Types of families whose samples only grow.
_GROWING = ("counter", "histogram", "summary")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Gauges of replicas that are combined by something other than a sum: shares, levels, flags.
_COMBINED: dict[str, Callable[[list[float]], float]] = {
    "vllm:kv_cache_usage_perc": _mean,
    "vllm:cache_config_info": max,
    "vllm:lora_requests_info": max,
    "mlx_paged:memory_pressure": max,
    "mlx_paged:steps_compiled": min,
    "mlx_paged:foreign_operations": max,
    "process_start_time_seconds": min,
    "process_max_fds": min,
}


@dataclass(frozen=True)
class Family:
    """A metric family in the text format.

    Attributes:
        head: Its lines HELP and TYPE.
        type: Its type.
        samples: Its other lines, `name{labels} value`.
    """

    head: str
    type: str
    samples: list[str]


#: Families by name in the text format, where a counter's name ends with `_total`.
Families = dict[str, Family]


def parsed(text: str) -> Families:
    """Splits a text of `generate_latest` into families."""
    families: Families = {}
    samples: list[str] = []
    help_line = ""
    for line in text.split("\n"):  # Not splitlines: U+2028 may be in a label.
        if line.startswith("# HELP "):
            help_line = line
        elif line.startswith("# TYPE "):
            _, _, name, type_ = line.split(" ")
            samples = []
            families[name] = Family(f"{help_line}\n{line}", type_, samples)
        elif line:
            samples.append(line)
    return families


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def families_of(metrics: Iterable[Metric]) -> Families:
    """Converts metrics of this process."""
    registry = CollectorRegistry()
    registry.register(_Collected(tuple(metrics)))
    return parsed(generate_latest(registry).decode())


async def merged(own: str, of_models: Iterable[tuple[str, Families]]) -> bytes:
    """Merges metrics; returns Prometheus's text format.

    Args:
        own: The router's metrics, in that format.
        of_models: (model, its families). The samples get the label `model_name`. An iterator is
            advanced between turns of the event loop.
    """
    families = parsed(own)
    for model_name, found in of_models:
        escaped = model_name.translate(_ESCAPED)
        for name, family in found.items():
            kept = families.setdefault(name, replace(family, samples=[]))
            kept.samples.extend([_labeled(line, escaped) for line in family.samples])
        await asyncio.sleep(0)  # Streams go on between two models.
    return "".join(
        "\n".join((family.head, *family.samples, "")) for family in families.values()
    ).encode()


def _labeled(line: str, model_name: str) -> str:
    """Returns a sample with an escaped name in its label `model_name`, which is added if needed."""
    found = _MODEL_NAME.match(line)
    if found is not None:
        return f"{line[: found.start(1)]}{model_name}{line[found.end(1) :]}"
    series, _, value = line.rpartition(" ")
    labels = f"{series[:-1]}," if series.endswith("}") else f"{series}{{"
    return f'{labels}model_name="{model_name}"}} {value}'


class ReplicaMetrics:
    """Adds up the metrics of a model's replicas.

    Counters and histograms must never fall: Prometheus would take that for a restart of the whole
    server. So the last counts read from a replica stay in the sums after it ends.
    """

    def __init__(self) -> None:
        self._running: dict[object, Families] = {}
        self._ended: Families = {}  # families of ended replicas, added up

    def update(self, replica: object, text: str) -> None:
        """Stores the metrics of a running replica, in Prometheus's text format."""
        self._running[replica] = parsed(text)

    def end(self, replica: object) -> None:
        """Keeps the last counts of a replica that has ended."""
        for name, family in self._running.pop(replica, {}).items():
            if family.type in _GROWING:
                before = self._ended.get(name)
                both = [family] if before is None else [before, family]
                self._ended[name] = _combined(name, both)

    def families(self) -> Families:
        """Returns the families of all replicas."""
        by_name: dict[str, list[Family]] = {}
        for families in (self._ended, *self._running.values()):
            for name, family in families.items():
                by_name.setdefault(name, []).append(family)
        return {name: _combined(name, families) for name, families in by_name.items()}


def _combined(name: str, families: list[Family]) -> Family:
    """Combines the families of one name from several replicas."""
    values: dict[str, list[float]] = {}  # by name and labels
    for family in families:
        for line in family.samples:
            series, _, value = line.rpartition(" ")
            values.setdefault(series, []).append(float(value))
    combine = min if name.endswith("_created") else _COMBINED.get(name, sum)
    samples = [f"{series} {combine(each)!r}" for series, each in values.items()]
    return replace(families[0], samples=samples)
