"""Images outside of arrays: as PNG bytes, for files and for chat services. Needs Pillow."""

from __future__ import annotations

import base64
import functools
import hashlib
import io

import numpy as np

MAX_PIXELS = 2048 * 2048  # of a file that is read: a small file can hold a picture of any size
MAX_BYTES = 4 * MAX_PIXELS
THUMBNAIL_PX = 112
_PREFIX = "data:image/png;base64,"


class PngError(ValueError):
    """Bytes that are no PNG of the kind that is read here; the message goes on "... is "."""


def digest(image: np.ndarray) -> str:
    """What names an image by its content: SHA-256 of size and pixels, as 64 hexadecimal digits."""
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()


def encode(image: np.ndarray) -> bytes:
    """uint8 [height, width, 3] -> PNG."""
    from PIL import Image  # only images need it

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def decode(content: bytes) -> np.ndarray:
    """PNG -> uint8 [height, width, 3]. Raises PngError for anything but an RGB picture of at most MAX_PIXELS."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise PngError(f"a picture of {width} x {height} pixels, more than {MAX_PIXELS} in all")
            if picture.mode != "RGB":
                raise PngError(f"a picture in the mode {picture.mode}, not RGB")
            return np.array(picture)
    except PngError:
        raise
    except Exception as error:  # Pillow raises many types for damaged files
        raise PngError(f"no whole PNG ({error})") from error


def data_uri(image: np.ndarray) -> str:
    """The image as the URL of an `image_url` part of a chat message."""
    return _data_uri(image.shape, image.tobytes())


def thumbnail_uri(image: np.ndarray) -> str:
    """The image for a page, as a URL of at most 13 kB: THUMBNAIL_PX high and wide at most, in 32 colours."""
    from PIL import Image

    picture = Image.fromarray(image)
    picture.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    file = io.BytesIO()
    # Pillow's default, the median cut, gives a small green figure the colour of the crates around it.
    picture.quantize(32, method=Image.Quantize.FASTOCTREE).save(file, "PNG", optimize=True)
    return _PREFIX + base64.b64encode(file.getvalue()).decode()


@functools.lru_cache(maxsize=256)  # rollouts of a task show the same pictures, and are sent one after the other
def _data_uri(shape: tuple[int, ...], pixels: bytes) -> str:
    content = encode(np.frombuffer(pixels, np.uint8).reshape(shape))
    return _PREFIX + base64.b64encode(content).decode()
