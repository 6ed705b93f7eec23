"""mlx-lm's models on paged caches: plans, caches, attention patches. Knows nothing of requests."""
