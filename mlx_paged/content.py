"""The media that prompts may have. A separate module without MLX, for options."""

from typing import Literal

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
