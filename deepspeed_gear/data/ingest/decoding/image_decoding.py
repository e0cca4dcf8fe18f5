"""Decoding of JPEG and PNG files of a source into arrays."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import Expansion, optional
from deepspeed_gear.data.ingest.source_columns import LEAVE_OUT
from deepspeed_gear.errors import DataError

_HEADS = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # of JPEG and PNG


def decode_images(
    where: str, frames: list[bytes], expansion: Expansion, file_bytes: int
) -> NDArray[np.uint8]:
    """Decode JPEG or PNG files.

    Args:
        frames: The image files.
        file_bytes: Bytes of the source's file, which may refer to one image many times.
    Returns:
        [N, height, width(, channels)], uint8.
    """
    Image = optional(where, "must be decoded, as it holds images", "pillow", "PIL.Image")
    for frame in frames:
        if not isinstance(frame, bytes) or not frame.startswith(_HEADS):
            head = frame[:8] if isinstance(frame, bytes) else type(frame).__name__
            raise DataError(where, "must hold images in the format JPEG or PNG", head, LEAVE_OUT)
    # Pillow would open other formats by their content, and for some starts programs. A malformed
    # image can raise any exception.
    with DataError.on(
        where,
        "must hold JPEG or PNG images of one size, with 8 bits a channel",
        Exception,
        remedy=LEAVE_OUT,
    ):
        # `open` reads the headers only, so that the sizes are checked before pixels are decoded.
        images = [Image.open(io.BytesIO(frame), formats=("JPEG", "PNG")) for frame in frames]
        pixels = sum(image.width * image.height * len(image.getbands()) for image in images)
        expansion.check(where, pixels, min(file_bytes, sum(map(len, frames))))
        # Other modes have 16 bits, or a palette.
        if not {image.mode for image in images} <= {"L", "RGB", "RGBA", "CMYK"}:
            raise ValueError(f"an image of mode {images[0].mode}")
        return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
