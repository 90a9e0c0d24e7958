"""Background photographs: panoramas (Poly Haven, through @pmndrs/assets) and textures.

None of them shows one of the nouns; see ART.md for the licences.
"""

import base64
import re
from importlib import util
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 384
SCIKIT_IMAGE = ("brick.png", "grass.png", "gravel.png", "hubble_deep_field.jpg")
SCIKIT_LEARN = ("china.jpg",)


def squares(image_HW3: np.ndarray) -> list[np.ndarray]:
    """Cut an image into squares of its shorter side, each resized to SIDE."""
    height, width = image_HW3.shape[:2]
    side = min(height, width)
    starts = range(0, max(height, width) - side + 1, max(1, side * 2 // 3))
    cuts = [
        image_HW3[:, s : s + side] if width >= height else image_HW3[s : s + side] for s in starts
    ]
    return [
        np.asarray(Image.fromarray(cut).resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        for cut in cuts
    ]


def tone_map(linear_HW3: np.ndarray) -> np.ndarray:
    """Linear radiance -> sRGB-like uint8, exposed so that the median is a mid grey."""
    linear_HW3 = np.clip(
        np.nan_to_num(linear_HW3, posinf=1e4), 0.0, 1e4
    )  # suns overflow half floats
    exposed = linear_HW3 / max(float(np.median(linear_HW3)), 1e-6) * 0.25
    return (np.clip(exposed / (1 + 0.5 * exposed), 0, 1) ** (1 / 2.2) * 255).astype(np.uint8)


def load_panoramas(package: Path) -> list[np.ndarray]:
    """Decode and cut the package's EXR panoramas (base64 inside JavaScript modules)."""
    import OpenEXR  # art script only

    cuts: list[np.ndarray] = []
    for module in sorted((package / "hdri").glob("*.exr.js")):
        encoded = re.search(r"base64,([A-Za-z0-9+/=]+)", module.read_text())
        assert encoded is not None, module
        scratch = package / f"{module.stem}.tmp.exr"
        scratch.write_bytes(base64.b64decode(encoded.group(1)))
        with OpenEXR.File(str(scratch)) as exr:
            channels = exr.channels()
            pixels = next(iter(channels.values())).pixels.astype(np.float32)[..., :3]
        height = pixels.shape[0]
        cuts += squares(tone_map(pixels[height // 5 : height * 4 // 5]))
    return cuts


def installed_images(package: str, folder: str, names: tuple[str, ...]) -> list[np.ndarray]:
    """Images bundled inside an installed Python package."""
    spec = util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None  # it is no namespace package
    root = Path(spec.origin).parent / folder
    return [np.asarray(Image.open(root / name).convert("RGB")) for name in names]


def load_photos(panorama_package: Path) -> np.ndarray:
    """All background photographs, uint8 [N, SIDE, SIDE, 3]."""
    images = installed_images("skimage", "data", SCIKIT_IMAGE) + installed_images(
        "sklearn", "datasets/images", SCIKIT_LEARN
    )
    cuts = [cut for image in images for cut in squares(image)]
    return np.stack(cuts + load_panoramas(panorama_package))
