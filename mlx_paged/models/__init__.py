"""Loading mlx-lm models and preparing them for paged steps."""
