"""`mlx-paged chat`: a conversation in the terminal."""

from mlx_paged.cli.chat.verb import chat

__all__ = ["chat"]
