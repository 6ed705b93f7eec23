"""Merges the Prometheus metrics of several processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_LABEL = "model_name"


class _Families(Collector):
    """Holds metric families of other processes."""

    def __init__(self) -> None:
        self._by_name: dict[str, Metric] = {}

    def add(self, text: str, model_name: str | None) -> None:
        """Parses metrics in Prometheus's text format and labels them with their model."""
        for family in text_string_to_metric_families(text):
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


def merged(own: str, of_models: Mapping[str, str]) -> bytes:
    """Merges metrics in Prometheus's text format.

    Args:
        own: Those of the router.
        of_models: Those of each model's process, whose samples get the label `model_name`.
    """
    families = _Families()
    families.add(own, None)
    for name, text in of_models.items():
        families.add(text, name)
    registry = CollectorRegistry()
    registry.register(families)
    return generate_latest(registry)
