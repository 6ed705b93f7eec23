"""Renders scenes to normalized pixels with PyTorch tensor operations, on the training device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .atlas import EXTENT
from .scenes import SIDE


def _backgrounds(shades: Tensor, direction: Tensor) -> Tensor:
    """Returns [M, 3, SIDE, SIDE] from shades [M, 2, 3] and gradient directions [M]."""
    axis = torch.linspace(0, 1, SIDE, device=shades.device)
    ys, xs = torch.meshgrid(axis, axis, indexing="ij")
    c, s = direction.cos()[:, None, None], direction.sin()[:, None, None]
    way = (((xs - 0.5) * c + (ys - 0.5) * s) / 1.42 + 0.5)[:, None]
    first, second = shades[:, 0, :, None, None], shades[:, 1, :, None, None]
    return first * (1 - way) + second * way


def draw(
    atlas: Tensor,
    texture: Tensor,
    places: Tensor,
    colors: Tensor,
    stretch: Tensor,
    shades: Tensor,
    direction: Tensor,
) -> Tensor:
    """Draws pictures [M, 3, SIDE, SIDE] with values from 0 to 1.

    atlas [N, S, S]; texture [M, T] int64, negative for no object; places [M, T, 4]: x, y (fractions
    of the picture), radius in pixels before stretching, angle; colors [M, T, 3]; stretch [M, 2]:
    scale factors of x and y; shades [M, 2, 3]; direction [M].
    """
    image = _backgrounds(shades, direction)
    axis = (torch.arange(SIDE, device=atlas.device) + 0.5).to(places.dtype)
    for index in range(texture.shape[1]):
        x, y, radius, angle = places[:, index, :, None, None].unbind(1)
        dx = (axis[None, None, :] - x * SIDE) / stretch[:, :1, None]
        dy = (axis[None, :, None] - y * SIDE) / stretch[:, 1:, None]
        c, s = angle.cos(), angle.sin()
        u = (dx * c + dy * s) / radius
        v = (dy * c - dx * s) / radius
        grid = torch.stack([u, v], dim=-1) / EXTENT
        plane = atlas[texture[:, index].clamp(min=0)][:, None]
        distance = F.grid_sample(plane, grid, padding_mode="border", align_corners=False)[:, 0]
        pixels = distance * radius * stretch.mean(1)[:, None, None]
        alpha = (0.5 - pixels).clamp(0, 1)
        alpha = alpha * ((u.abs() < EXTENT) & (v.abs() < EXTENT))
        alpha = (alpha * (texture[:, index] >= 0)[:, None, None])[:, None]
        image = image * (1 - alpha) + colors[:, index, :, None, None] * alpha
    return image


def _cosines(device: torch.device) -> Tensor:
    n = torch.arange(8, device=device, dtype=torch.float32)
    basis = torch.cos((2 * n[None] + 1) * n[:, None] * math.pi / 16) / 2
    basis[0] /= math.sqrt(2)
    return basis


def damage(image: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Simulates cameras and files: blur, noise, block artifacts, exposure changes."""
    count, device = image.shape[0], image.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, device=device, generator=generator) * (high - low) + low

    blur = (uniform(-1.2, 1.0, 1, 1, 1)).clamp(min=0)
    soft = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    image = image * (1 - blur) + soft * blur
    basis = _cosines(device)
    step = uniform(-0.25, 0.16, 1, 1, 1, 1, 1).clamp(min=0)  # for coefficients of 8x8 blocks
    blocks = image.view(count, 3, SIDE // 8, 8, SIDE // 8, 8).transpose(3, 4)
    waves = basis @ blocks @ basis.T
    coarse = torch.where(step > 0, (waves / (step + 1e-6)).round() * step, waves)
    coarse = torch.cat([waves[..., :1, :], coarse[..., 1:, :]], dim=-2)
    image = (basis.T @ coarse @ basis).transpose(3, 4).reshape(image.shape)
    gain = uniform(-0.06, 0.04, 1, 1, 1) * (uniform(0, 1, 1, 1, 1) < 0.5)
    image = image * (1 + gain)
    level = uniform(-0.06, 0.07, 1, 1, 1).clamp(min=0)
    noise = torch.randn(image.shape, device=device, generator=generator)
    return (image + noise * level).clamp(0, 1)


def normalize(image: Tensor) -> Tensor:
    """Maps 0..1 to -1..1 in steps of whole bytes, as image files do."""
    return (image * 255).round() / 127.5 - 1
