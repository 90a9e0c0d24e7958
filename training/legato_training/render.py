"""Draw batches of scenes: affinely sampled sprites on generated backgrounds, then camera faults.

All on one device, batched, eager or compiled. B batch, K objects, Y X pixels; colours 0..1,
premultiplied inside.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from legato_training.scenes import BACKGROUNDS, CROP
from legato_training.sprites import SIDE, SpriteBook, pyramid

LUMA = (0.299, 0.587, 0.114)


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    """[count] uniform numbers."""
    return torch.rand(count, device=device) * (high - low) + low


def mix(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Linear blend."""
    return first + (second - first) * weight


class Renderer:
    """Holds the pyramid and photographs on a device; ``draw`` is the whole pipeline."""

    def __init__(self, book: SpriteBook, device: torch.device, compiled: bool = False) -> None:
        texels, starts = pyramid(book.rgba)
        self.texels = torch.from_numpy(texels).to(device)
        self.starts = torch.from_numpy(starts).to(device)
        self.photos = torch.from_numpy(np.ascontiguousarray(book.photos)).to(device)
        self.device = device
        ticks = (torch.arange(CROP, device=device) + 0.5) / CROP
        self.y, self.x = torch.meshgrid(ticks, ticks, indexing="ij")
        self.dct = dct_matrix(device)
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.paint = wrap(paint)
        self.backdrop = wrap(backdrop)
        self.finish = wrap(finish)

    def draw(self, batch: dict[str, Tensor], restyle: bool = True, faults: bool = True) -> Tensor:
        """Pixels in -1..1 [B, 3, Y, X], with or without changed sprite styles and camera faults."""
        count = batch["sprite"].shape[0]
        noise = [torch.rand(count, 3, n, n, device=self.device) for n in (4, 11, 31)]
        image = self.backdrop(
            self.x,
            self.y,
            batch["background"],
            batch["background_colours"],
            self.photos,
            torch.rand(count, 12, device=self.device),
            *noise,
        )
        style = style_parameters(count, batch["sprite"].shape[1], self.device, restyle)
        canvas = [channel.contiguous() for channel in image.unbind(1)]
        for k in range(batch["sprite"].shape[1]):
            canvas = self.paint(
                *canvas,
                self.x,
                self.y,
                self.texels,
                self.starts,
                batch["sprite"][:, k],
                batch["level"][:, k],
                batch["inverse"][:, k],
                batch["tint"][:, k],
                style[:, k],
            )
        image = torch.stack(list(canvas), 1)
        if faults:
            image = self.finish(
                image, self.dct, torch.rand(count, 12, device=self.device), torch.randn_like(image)
            )
        image = torch.round(image.clamp(0, 1) * 255) / 255
        return (image - 0.5) / 0.5


def style_parameters(count: int, objects: int, device: torch.device, restyle: bool) -> Tensor:
    """Per object [B, K, 8], in the order that ``restyle`` unpacks."""
    neutral = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 255.0, 0.0, 0.0], device=device)
    if not restyle:
        return neutral.expand(count, objects, 8)
    n = count * objects
    hue = torch.randn(n, device=device) * 0.10
    columns = [
        hue,
        uniform(n, 0.6, 1.35, device),
        uniform(n, 0.82, 1.12, device),
        uniform(n, 0.8, 1.2, device),
        uniform(n, 0.75, 1.3, device),
        torch.where(torch.rand(n, device=device) < 0.15, uniform(n, 3, 7, device), 255.0),
        (torch.rand(n, device=device) < 0.03).float(),
        torch.where(torch.rand(n, device=device) < 0.2, uniform(n, 0.3, 1.0, device), 0.0),
    ]
    styled = torch.stack(columns, 1).view(count, objects, 8)
    keep = torch.rand(count, 1, 1, device=device) < 0.25
    return torch.where(keep, neutral, styled)


def texel(texels: Tensor, base: Tensor, side: Tensor, row: Tensor, column: Tensor) -> list[Tensor]:
    """Premultiplied R, G, B, A 0..1 at integer places, each [B, Y, X]; outside is transparent."""
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    index = base + row.clamp(min=0).minimum(side - 1) * side + column.clamp(min=0).minimum(side - 1)
    packed = torch.where(inside, texels[index], 0)
    return [((packed >> shift) & 255).float() * (1 / 255) for shift in (0, 8, 16, 24)]


def sample(texels: Tensor, base: Tensor, side: Tensor, u: Tensor, v: Tensor) -> list[Tensor]:
    """Bilinear R, G, B, A at sprite units u, v in -0.5..0.5, apart so that kernels fuse."""
    column, row = (u + 0.5) * side - 0.5, (v + 0.5) * side - 0.5
    c0, r0 = column.floor(), row.floor()
    fc, fr = column - c0, row - r0
    c0, r0 = c0.long(), r0.long()
    corners = [texel(texels, base, side, r0 + dr, c0 + dc) for dr in (0, 1) for dc in (0, 1)]
    return [mix(mix(a, b, fc), mix(c, d, fc), fr) for a, b, c, d in zip(*corners, strict=True)]


def restyle(rgb: list[Tensor], alpha: Tensor, tint: Tensor, style: Tensor) -> list[Tensor]:
    """Straight colours after tint, hue, saturation, brightness, contrast, gamma, posterise, rim."""
    hue, saturation, brightness, contrast, gamma, steps, grey, rim = (
        s[:, None, None] for s in style.unbind(1)
    )
    rgb = [channel * tint[:, i, None, None] for i, channel in enumerate(rgb)]
    luma = sum(channel * weight for channel, weight in zip(rgb, LUMA, strict=True))
    chroma = [channel - luma for channel in rgb]
    mean = sum(chroma) / 3
    edge = (1 - (2 * alpha - 1).abs()).clamp(0, 1) * rim
    styled = []
    for i in range(3):
        # A hue turn is a rotation about the grey axis: Rodrigues' formula on the chroma.
        across = (chroma[(i + 2) % 3] - chroma[(i + 1) % 3]) * 0.57735
        turned = chroma[i] * hue.cos() + across * hue.sin() + mean * (1 - hue.cos())
        value = ((luma + turned * saturation * (1 - grey) - 0.5) * contrast + 0.5) * brightness
        value = value.clamp(1e-4, 1) ** gamma
        styled.append(
            torch.where(steps < 200, torch.round(value * steps) / steps, value) * (1 - edge)
        )
    return styled


def paint(
    red: Tensor,
    green: Tensor,
    blue: Tensor,
    x: Tensor,
    y: Tensor,
    texels: Tensor,
    starts: Tensor,
    sprite: Tensor,
    level: Tensor,
    inverse: Tensor,
    tint: Tensor,
    style: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One object per image over the canvas, whose channels are [B, Y, X]."""
    side = (SIDE >> level.long())[:, None, None]
    base = (
        starts[level.long()][:, None, None]
        + sprite.clamp(min=0).long()[:, None, None] * side * side
    )
    m = inverse[:, :, :, None, None]
    u = m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]
    v = m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]
    *premultiplied, opacity = sample(texels, base, side, u, v)
    straight = [channel / opacity.clamp(min=1e-3) for channel in premultiplied]
    alpha = torch.where((sprite >= 0)[:, None, None], opacity, 0.0)
    styled = restyle(straight, opacity, tint, style)
    rgb = zip((red, green, blue), styled, strict=True)
    red, green, blue = [mix(old, new, alpha) for old, new in rgb]
    return red, green, blue


def photo_crop(photos: Tensor, x: Tensor, y: Tensor, rolls: Tensor) -> Tensor:
    """Random crop of a random photograph per image, bilinear, [B, 3, Y, X]."""
    number, side = photos.shape[0], photos.shape[1]
    pick = (rolls[:, 0] * number).long().clamp(max=number - 1)[:, None, None]
    zoom = (0.25 + 0.75 * rolls[:, 1])[:, None, None]
    flip = torch.where(rolls[:, 2] < 0.5, -1.0, 1.0)[:, None, None]
    column = ((x - 0.5) * flip * zoom + 0.5 + (rolls[:, 3, None, None] - 0.5) * (1 - zoom)) * (
        side - 1
    )
    row = ((y - 0.5) * zoom + 0.5 + (rolls[:, 4, None, None] - 0.5) * (1 - zoom)) * (side - 1)
    c0, r0 = column.floor().long().clamp(0, side - 2), row.floor().long().clamp(0, side - 2)
    fc, fr = (column - c0)[..., None], (row - r0)[..., None]
    upper = mix(photos[pick, r0, c0].float(), photos[pick, r0, c0 + 1].float(), fc)
    lower = mix(photos[pick, r0 + 1, c0].float(), photos[pick, r0 + 1, c0 + 1].float(), fc)
    return mix(upper, lower, fr).permute(0, 3, 1, 2) / 255


def backdrop(
    x: Tensor,
    y: Tensor,
    kind: Tensor,
    colours: Tensor,
    photos: Tensor,
    rolls: Tensor,
    *noise: Tensor,
) -> Tensor:
    """Background [B, 3, Y, X] of the asked kind from two colours, noise fields and photographs."""
    first, second = colours[:, 0, :, None, None], colours[:, 1, :, None, None]
    r = rolls[:, :, None, None]
    angle = r[:, 0] * 6.2832
    along = (x - 0.5) * angle.cos() + (y - 0.5) * angle.sin()
    across = (y - 0.5) * angle.cos() - (x - 0.5) * angle.sin()
    radial = ((x - r[:, 1]) ** 2 + (y - r[:, 2]) ** 2).sqrt()
    ramp = torch.where(r[:, 3] < 0.7, along * 0.8 + 0.5, radial).clamp(0, 1)
    waves = 3 + 14 * r[:, 4] ** 2
    stripes = ((along * waves * 6.2832).sin() * 8 + (r[:, 5] - 0.5) * 6).sigmoid()
    checks = ((along * waves * 6.2832).sin() * (across * waves * 6.2832).sin() * 16).sigmoid()
    fields = [F.interpolate(n, size=x.shape, mode="bilinear") for n in noise]
    weights = (0.4 + r[:, 6:7], 0.7 * r[:, 7:8], 0.4 * r[:, 8:9])
    cloud = sum(f * w for f, w in zip(fields, weights, strict=True)) / sum(weights)
    assert isinstance(cloud, Tensor)  # there are three fields
    grain = 1 + 0.25 * (along * (20 + 60 * r[:, 9]) + 4 * fields[1][:, 0]).sin()[:, None]
    textured = mix(
        mix(first, second, cloud[:, :1]) * grain.clamp(max=1.1),
        cloud,
        (r[:, 10:11] * 1.2 - 0.2).clamp(0, 1),
    )
    photo = photo_crop(photos, x, y, rolls)
    photo = ((photo - 0.5) * (0.5 + 0.6 * r[:, 10:11]) + 0.5) * (0.6 + 0.5 * r[:, 11:12])
    photo = mix(photo, photo * (0.5 + first * 0.8), r[:, 9:10])
    choices = (
        first.expand_as(photo),
        mix(first, second, ramp[:, None]),
        mix(first, second, stripes[:, None]),
        mix(first, second, checks[:, None]),
        textured,
        photo,
    )
    image = choices[0]
    for index in range(1, len(BACKGROUNDS)):
        image = torch.where((kind == index)[:, None, None, None], choices[index], image)
    return image.clamp(0, 1)


def dct_matrix(device: torch.device) -> Tensor:
    """Orthonormal 8-point DCT [8, 8]."""
    n = torch.arange(8, device=device, dtype=torch.float32)
    matrix = torch.cos((2 * n[None, :] + 1) * n[:, None] * torch.pi / 16) * 0.5
    matrix[0] *= 0.5**0.5
    return matrix


def blocky(image: Tensor, dct: Tensor, step_B: Tensor) -> Tensor:
    """JPEG-like artefacts: quantise 8x8 DCT coefficients, coarser for high frequencies."""
    batch, channels, height, width = image.shape
    tiles = image.reshape(batch, channels, height // 8, 8, width // 8, 8).permute(0, 1, 2, 4, 3, 5)
    coefficients = dct @ tiles @ dct.t()
    order = torch.arange(8, device=image.device, dtype=torch.float32)
    step = step_B[:, None, None, None, None, None] * (1 + order[:, None] + order[None, :])
    kept = dct.t() @ (torch.round(coefficients / step) * step) @ dct
    return kept.permute(0, 1, 2, 4, 3, 5).reshape(batch, channels, height, width)


def finish(image: Tensor, dct: Tensor, rolls: Tensor, gauss: Tensor) -> Tensor:
    """Camera and codec faults: exposure, cast, blur or sharpening, noise, blocks, grey."""
    r = rolls[:, :, None, None]
    cast = torch.stack([0.92 + 0.16 * rolls[:, i] for i in (0, 1, 2)], 1)[:, :, None, None]
    strong = (r[:, 3:4] < 0.6).float()
    image = mix(
        image,
        (image * cast * (0.8 + 0.4 * r[:, 4:5])).clamp(0, 1) ** (0.8 + 0.45 * r[:, 5:6]),
        strong,
    )
    soft = F.avg_pool2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), 3, 1)
    softer = F.avg_pool2d(F.pad(soft, (1, 1, 1, 1), mode="replicate"), 3, 1)
    amount = torch.where(
        r[:, 6:7] < 0.35, r[:, 7:8], torch.where(r[:, 6:7] < 0.7, -0.8 * r[:, 7:8], 0.0)
    )
    image = mix(image, torch.where(r[:, 6:7] < 0.1, softer, soft), amount)
    image = image + gauss * (0.06 * (r[:, 8:9] - 0.5).clamp(min=0) * 2)
    step = 0.01 + 0.05 * rolls[:, 9] ** 2
    image = torch.where(r[:, 10:11] < 0.3, blocky(image, dct, step), image)
    luma = image[:, 0:1] * LUMA[0] + image[:, 1:2] * LUMA[1] + image[:, 2:3] * LUMA[2]
    return torch.where(r[:, 11:12] < 0.02, luma.expand_as(image), image)


def make_renderer(path: Path, device: torch.device, compiled: bool) -> tuple[SpriteBook, Renderer]:
    """Load the pack once for both the sampler and the renderer."""
    from legato_training.sprites import load_sprites

    book = load_sprites(path)
    return book, Renderer(book, device, compiled)
