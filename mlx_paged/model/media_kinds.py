"""The media that prompts may have. (In a module that does not import MLX, for options.)"""

from typing import Literal

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
