"""`mlx-paged chat`: a conversation in the terminal."""
