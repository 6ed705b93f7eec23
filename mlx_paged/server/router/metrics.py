"""Merges the Prometheus metrics of several processes: of different models, and of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_LABEL = "model_name"
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

_Key = tuple[str, frozenset[tuple[str, str]]]  # name and labels of a sample


class _Families(Collector):
    """Holds metric families of other processes."""

    def __init__(self) -> None:
        self._by_name: dict[str, Metric] = {}

    def add(self, families: Iterable[Metric], model_name: str | None) -> None:
        """Adds families, and labels their samples with a model."""
        for family in families:
            kept = self._by_name.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = dict(sample.labels)
                if model_name is not None:
                    labels[_LABEL] = model_name
                kept.samples.append(sample._replace(labels=labels))

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._by_name.values()


def merged(own: str, of_models: Mapping[str, Iterable[Metric]]) -> bytes:
    """Merges metrics; returns Prometheus's text format.

    Args:
        own: The router's metrics, in that format.
        of_models: Metrics by model; their samples get the label `model_name`.
    """
    families = _Families()
    families.add(text_string_to_metric_families(own), None)
    for name, found in of_models.items():
        families.add(found, name)
    registry = CollectorRegistry()
    registry.register(families)
    return generate_latest(registry)


class ReplicaMetrics:
    """Adds up the metrics of a model's replicas.

    Counters and histograms must never fall: Prometheus would take that for a restart of the whole
    server. So the last counts read from a replica stay in the sums after it ends.
    """

    def __init__(self) -> None:
        self._running: dict[object, list[Metric]] = {}
        self._ended: dict[str, Metric] = {}  # families of ended replicas, added up

    def update(self, replica: object, text: str) -> None:
        """Stores the metrics of a running replica, in Prometheus's text format."""
        self._running[replica] = list(text_string_to_metric_families(text))

    def end(self, replica: object) -> None:
        """Keeps the last counts of a replica that has ended."""
        for family in self._running.pop(replica, ()):
            if family.type in _GROWING:
                before = self._ended.get(family.name)
                both = [family] if before is None else [before, family]
                self._ended[family.name] = _combined(both)

    def families(self) -> list[Metric]:
        """Returns the families of all replicas."""
        by_name: dict[str, list[Metric]] = {}
        for family in (*self._ended.values(), *(f for fs in self._running.values() for f in fs)):
            by_name.setdefault(family.name, []).append(family)
        return [_combined(families) for families in by_name.values()]


def _combined(families: list[Metric]) -> Metric:
    """Combines the families of one name from several replicas."""
    first = families[0]
    values: dict[_Key, list[float]] = {}
    samples: dict[_Key, Sample] = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            samples.setdefault(key, sample)
            values.setdefault(key, []).append(sample.value)
    combine = min if first.name.endswith("_created") else _COMBINED.get(first.name, sum)
    made = Metric(first.name, first.documentation, first.type)
    made.samples = [s._replace(value=combine(values[key])) for key, s in samples.items()]
    return made
