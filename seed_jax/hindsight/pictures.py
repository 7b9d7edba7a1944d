"""The images of stage 1 on disk: each once, as images/<digest of its pixels>.png beside the files that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from seed_jax import png
from seed_jax.hindsight.records import IMAGES_FOLDER, RecordError, image_name

_NAME = re.compile(rf"{IMAGES_FOLDER}/[0-9a-f]{{64}}\.png")


def store(directory: Path, images: Iterable[np.ndarray]) -> None:
    """Writes the images that are not there yet."""
    for image in images:
        path = directory / image_name(image)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(png.encode(image))
            partial.replace(path)


class Reader:
    """name -> image, uint8 [height, width, 3], of the files in a directory; each is read and held once.

    Raises RecordError, naming the file, for what is missing or is not the picture that was stored under its name. Only
    names that `store` gives are read, so no name leads out of the directory.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._held: dict[str, np.ndarray] = {}

    def __call__(self, name: Any) -> np.ndarray:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RecordError(
                f"{self.directory}: {str(name)[:200]!r} cannot be the name of an image; one is "
                f"{IMAGES_FOLDER}/<64 hexadecimal digits>.png, a file in that directory"
            )
        if name not in self._held:
            self._held[name] = self._read(name)
        return self._held[name]

    def _read(self, name: str) -> np.ndarray:
        path = self.directory / name
        try:
            if path.stat().st_size > png.MAX_BYTES:
                raise RecordError(f"{path} has more than {png.MAX_BYTES} bytes; no image of an episode is that large")
            image = png.decode(path.read_bytes())
        except OSError as error:
            raise RecordError(
                f"{path}: {error.strerror}; copy {IMAGES_FOLDER}/ with the files that name its images"
            ) from error
        except png.PngError as error:
            raise RecordError(f"{path} is {error}; remove it, and collect the episodes anew") from error
        if name != image_name(image):
            raise RecordError(
                f"{path} is not the picture that was stored under this name; remove it, and collect the episodes anew"
            )
        image.flags.writeable = False
        return image
