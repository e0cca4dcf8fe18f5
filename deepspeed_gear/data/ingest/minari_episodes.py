"""Interface to the episodes of a Minari data set in any form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import DataError

Key = tuple[str, ...]


class EpisodeStore(ABC):
    """Interface to the stored episodes of a Minari data set: one class per form.

    Attributes:
        numbers: The episodes, in numerical order.
    """

    numbers: list[int]

    @abstractmethod
    def where(self, number: int, *key: str) -> str:
        """Return how an error names a part of an episode."""

    @abstractmethod
    def facts(self, number: int) -> dict[str, Any]:
        """Return the metadata of an episode: id, seed, total_steps."""

    @abstractmethod
    def keys(self, number: int) -> list[Key]:
        """Return the paths of all arrays of an episode."""

    @abstractmethod
    def load(self, number: int, key: Key) -> NDArray[Any]:
        """Read an array: T + 1 rows for observations, T or T + 1 for infos, T for the rest."""

    @abstractmethod
    def close(self) -> None:
        """Release the files; safe to call twice."""


def decode_jpeg(where: str, frames: list[bytes], expansion: Expansion) -> NDArray[np.uint8]:
    """Decode Minari's image observations. Returns [N, height, width(, channels)], uint8.

    Raises:
        DataError: Pillow is missing, a frame is not an image of the size of the first, or they are too large
            for their bytes.
    """
    try:
        import io

        from PIL import Image
    except ImportError:
        raise DataError(where, "must be decoded from JPEG", None, "pip install pillow") from None
    try:
        images = [Image.open(io.BytesIO(frame)) for frame in frames]  # reads the headers
        pixels = sum(image.width * image.height * len(image.getbands()) for image in images)
        expansion.check(where, pixels, sum(map(len, frames)))
        return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(where, "must hold images of one size", str(error)) from error
