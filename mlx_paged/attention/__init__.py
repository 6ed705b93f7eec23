"""How a step's rows meet the pool: the plan, the per-layer caches and the seam into mlx-lm."""
