"""mlx-lm's models on paged caches: plans, caches, attention patches. Independent of requests."""
