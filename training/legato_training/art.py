"""Download the open drawings, rasterise them and pack them: ``python -m legato_training.art``.

The pack (training/.data/sprites.npz) holds one 160x160 WebP a drawing, cropped to its alpha with a
margin, its outline and hull in unit sprite coordinates (-0.5..0.5), and background photographs.
"""

import argparse
import base64
import io
import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from legato_training.art_sets import ART_SETS, CODE_PACKAGE, PHOTO_PACKAGE, ArtSet, find_icon
from legato_training.lexicon import all_nouns
from legato_training.sprites import PHOTO_SIDE, trace_outline
from legato_training.vocabulary import ROOT

SIDE = 160
MARGIN = 4
QUALITY = 80


def npm_install(folder: Path) -> Path:
    """Install the exact art packages with npm and return node_modules."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"name": "legato-art", "private": true}')
    wanted = [f"{a.package}@{a.version}" for a in ART_SETS]
    wanted += ["@".join(CODE_PACKAGE), "@".join(PHOTO_PACKAGE)]
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *wanted],
        cwd=folder,
        check=True,
    )
    return folder / "node_modules"


def rasterise(svg: str, width: int = 2 * SIDE) -> Image.Image:
    """SVG text -> RGBA image (reduced later with a good filter)."""
    import resvg_py  # only the art script needs it, training machines do not have it

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=width))
    return Image.open(io.BytesIO(png)).convert("RGBA")


def fit(image: Image.Image) -> Image.Image | None:
    """Crop to visible alpha and fit into SIDE x SIDE, keeping the aspect and a margin."""
    alpha = np.asarray(image)[..., 3]
    rows, columns = np.where(alpha.max(1) > 24)[0], np.where(alpha.max(0) > 24)[0]
    if len(rows) < 8 or len(columns) < 8:
        return None
    image = image.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
    room = SIDE - 2 * MARGIN
    scale = room / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    # PIL resizes RGBA premultiplied, so transparent black does not bleed into edges.
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
    canvas.paste(image, ((SIDE - width) // 2, (SIDE - height) // 2))
    return canvas


def draw(job: tuple[str, str, int, str]) -> dict[str, Any] | None:
    """One job (set, source, noun, label) -> sprite record; source is SVG text or a file path."""
    set_name, source, noun, label = job
    try:
        image = (
            Image.open(source).convert("RGBA")
            if not source.lstrip().startswith("<svg")
            else rasterise(source)
        )
    except Exception as error:  # noqa: BLE001 - a broken drawing is reported and left out
        print(f"skipped {set_name} {label}: {error}")
        return None
    fitted = fit(image)
    if fitted is None:
        return None
    outline, hull, share = trace_outline(np.asarray(fitted)[..., 3])
    if outline is None:
        return None
    buffer = io.BytesIO()
    fitted.save(buffer, "WEBP", quality=QUALITY, alpha_quality=90, method=6)
    return {
        "set": set_name,
        "noun": noun,
        "label": label,
        "webp": buffer.getvalue(),
        "outline": outline,
        "hull": hull,
        "share": share,
    }


def svg_of(icons: dict[str, Any], name: str) -> str:
    """Iconify JSON entry -> a standalone SVG."""
    icon = icons["icons"].get(name) or icons["icons"][icons["aliases"][name]["parent"]]
    width = icon.get("width", icons.get("width", 16))
    height = icon.get("height", icons.get("height", 16))
    left, top = icon.get("left", 0), icon.get("top", 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def jobs_of(art_set: ArtSet, modules: Path) -> list[tuple[str, str, int, str]]:
    """Every drawing of the nouns in one set."""
    labelled = [(noun, label) for noun, entry in enumerate(all_nouns()) for label in entry.labels]
    if art_set.webp_by_code:
        codes = {
            e["label"].lower(): e["hexcode"].lower()
            for e in json.loads((modules / CODE_PACKAGE[0] / "en/data.json").read_text())
        }
        folder = modules / art_set.package / "assets"
        files = {path.stem.replace("-fe0f", ""): path for path in folder.glob("*.webp")}
        found = [
            (n, label, files.get(codes[label.lower()].replace("-fe0f", "")))
            for n, label in labelled
        ]
        return [(art_set.name, str(path), n, label) for n, label, path in found if path]
    icons = json.loads((modules / art_set.package / "icons.json").read_text())
    names = set(icons["icons"]) | set(icons.get("aliases", {}))
    found_icons = [(n, label, find_icon(art_set, label, names)) for n, label in labelled]
    return [(art_set.name, svg_of(icons, icon), n, label) for n, label, icon in found_icons if icon]


def pack(records: list[dict[str, Any]], photos: np.ndarray, path: Path) -> None:
    """Write the pack: concatenated WebP bytes, offsets and per-sprite arrays."""
    blobs = [record["webp"] for record in records]
    sets = [a.name for a in ART_SETS]
    jpegs = []
    for photo in photos:
        buffer = io.BytesIO()
        Image.fromarray(photo).save(buffer, "JPEG", quality=85)
        jpegs.append(buffer.getvalue())
    np.savez(
        path,
        sprite_bytes=np.frombuffer(b"".join(blobs), np.uint8),
        sprite_offsets=np.cumsum([0] + [len(b) for b in blobs]).astype(np.int64),
        noun=np.array([r["noun"] for r in records], np.int16),
        set=np.array([sets.index(r["set"]) for r in records], np.int16),
        label=np.array([r["label"] for r in records]),
        outline=np.stack([r["outline"] for r in records]).astype(np.float16),
        hull=np.stack([r["hull"] for r in records]).astype(np.float16),
        share=np.array([r["share"] for r in records], np.float32),
        photo_bytes=np.frombuffer(b"".join(jpegs), np.uint8),
        photo_offsets=np.cumsum([0] + [len(b) for b in jpegs]).astype(np.int64),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "legato-art")
    options = parser.parse_args()
    modules = npm_install(options.work)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = [job for art_set in ART_SETS for job in jobs_of(art_set, modules)]
    with ProcessPoolExecutor() as pool:
        records = [record for record in pool.map(draw, jobs, chunksize=16) if record]
    pack(records, load_photos(modules / PHOTO_PACKAGE[0]), options.out)
    counts = {a.name: sum(r["set"] == a.name for r in records) for a in ART_SETS}
    print(
        json.dumps(
            {"sprites": len(records), "MB": options.out.stat().st_size / 1e6, "sets": counts}
        )
    )


# ---------------------------------------------------------------- photographs
# Panoramas (Poly Haven, through @pmndrs/assets) and textures. None of them shows one of the nouns;
# see ART.md for the licences.

SCIKIT_IMAGE = ("brick.png", "grass.png", "gravel.png", "hubble_deep_field.jpg")
SCIKIT_LEARN = ("china.jpg",)


def squares(image_HW3: np.ndarray) -> list[np.ndarray]:
    """Cut an image into squares of its shorter side, each resized to PHOTO_SIDE."""
    height, width = image_HW3.shape[:2]
    side = min(height, width)
    starts = range(0, max(height, width) - side + 1, max(1, side * 2 // 3))
    cuts = [
        image_HW3[:, s : s + side] if width >= height else image_HW3[s : s + side] for s in starts
    ]
    return [
        np.asarray(Image.fromarray(cut).resize((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.LANCZOS))
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
    """All background photographs, uint8 [N, PHOTO_SIDE, PHOTO_SIDE, 3]."""
    images = installed_images("skimage", "data", SCIKIT_IMAGE) + installed_images(
        "sklearn", "datasets/images", SCIKIT_LEARN
    )
    cuts = [cut for image in images for cut in squares(image)]
    return np.stack(cuts + load_panoramas(panorama_package))


if __name__ == "__main__":
    main()
