"""Benchmarks that users run: workloads, runners, figures and reports behind `mlx-paged bench`."""
