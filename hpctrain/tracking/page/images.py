"""Images and figures of a run: a file in its directory for each, which the uploader publishes.

    tracker.log_figure("attention", figure, step=100)
        artifacts/images/attention+step+100+timestamp+1700000000000+0b1c....png

The names are those that MLflow's client gives to images, so that its page shows all steps of a key
behind one slider. The last part follows from key and step, so an attempt that repeats a step
replaces the image.
"""

import hashlib
import io
import re
import time
import uuid
from pathlib import Path
from typing import Any, cast

FOLDER = "artifacts/images"
_SMALL = 256  # pixels: MLflow's size of the images in a grid


def save_figure(run_dir: Path, key: str, figure: Any, step: int) -> list[Path]:
    """Write a figure of matplotlib; see `save_image`."""
    if not hasattr(figure, "savefig"):
        raise TypeError(f"log_figure({key!r}): a {type(figure).__name__} is no figure (matplotlib)")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, bbox_inches="tight")
    content.seek(0)
    return save_image(run_dir, key, content, step)


def save_image(run_dir: Path, key: str, image: Any, step: int) -> list[Path]:
    """Write an image as PNG, and a small one for MLflow's grid of images; return the files.

    `key` has letters, digits, `_`, `-`, `.`, blanks and `/`. `image` is what Pillow opens (a path
    or an open file), an image of Pillow, or an array on the CPU of shape (height, width), or
    (height, width, 1, 3 or 4): uint8, or floats from 0 to 1. A second image of the same key and
    step replaces the first one. Another object is a TypeError; a key or an array of another form is
    a ValueError.
    """
    if not re.fullmatch(r"[\w\-./ ]{1,100}", key, re.ASCII):
        raise ValueError(
            f"the name of an image has letters, digits, '_', '-', '.', '/' and blanks, not {key!r}"
        )
    whole = picture(key, image)
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(folder, key, step)
    small = whole.copy()
    small.thumbnail((_SMALL, _SMALL))
    files = [folder / f"{stem}.png", folder / f"{stem}+compressed.webp"]
    for file, content in zip(files, (whole, small), strict=True):
        unfinished = file.with_name(f".{file.name}")
        content.save(unfinished, format=file.suffix[1:])
        unfinished.replace(file)
    return files


def _stem(folder: Path, key: str, step: int) -> str:
    name = f"{key.replace('/', '~')}+step+{step}"
    known = next(folder.glob(f"{name}+timestamp+*.png"), None)
    if known is not None:
        return known.stem
    own = uuid.UUID(hashlib.sha256(name.encode()).hexdigest()[:32])
    return f"{name}+timestamp+{time.time_ns() // 1_000_000}+{own}"


def picture(key: str, image: Any) -> Any:
    """Return an image of Pillow; see `save_image`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise TypeError(
            f"log_image({key!r}) needs the package pillow: pip install 'hpctrain[images]'"
        ) from error
    if isinstance(image, (str, Path, io.IOBase)):
        image = Image.open(cast(Any, image))
    if isinstance(image, Image.Image):
        return image if image.mode in ("1", "L", "RGB", "RGBA") else image.convert("RGB")
    import numpy as np

    values = np.asarray(image)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim != 2 and not (values.ndim == 3 and values.shape[-1] in (3, 4)):
        raise ValueError(
            f"log_image({key!r}): the shape is {values.shape}; it must be (height, width) or "
            "(height, width, 1, 3 or 4)"
        )
    if values.dtype.kind == "f":
        # NaN is black: an image with a gap is better than none.
        values = (np.nan_to_num(values).clip(0, 1) * 255).round()
    elif values.dtype.kind == "b":
        values = values * 255
    elif values.dtype != np.uint8 and (values.min() < 0 or values.max() > 255):
        raise ValueError(f"log_image({key!r}): integers must be in 0..255")
    return Image.fromarray(values.astype(np.uint8))
