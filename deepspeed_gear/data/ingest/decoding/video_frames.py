"""Frames of MP4 videos at given times, as arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import DAMAGED, optional
from deepspeed_gear.data.ingest.source_columns import LEAVE_OUT
from deepspeed_gear.errors import DataError

_TOLERANCE_S = 1e-4  # between a frame and its time, as in LeRobot
CODECS = ("av1", "h264", "hevc", "vp9", "mpeg4")  # LeRobot writes the first three


def video_frames(
    path: Path,
    name: str,
    start: float,
    times: NDArray[Any],
    shape: tuple[int, ...],
    may_go_on: bool,
) -> NDArray[np.uint8]:
    """Decode the frames of an episode, which are the only ones between its first and its last.

    Args:
        path: The video.
        name: The episode, for errors.
        start: Time at which the episode begins, in seconds.
        times: Time of each frame after that, in seconds. [T].
        shape: Shape of a frame: (height, width, 3).
        may_go_on: Other frames may follow, as in a file of several episodes.
    Raises:
        DataError: The video is damaged, has another codec or shape, or not exactly these frames.
    """
    av = optional(str(path), "must be decoded with PyAV", f"av, or {LEAVE_OUT}", "av")
    where = f"{path}: {name}"
    times = start + times
    number = 0
    frames = np.empty((len(times), *shape), np.uint8)
    is_readable = DataError.on(where, "must be a readable video", av.FFmpegError, remedy=DAMAGED)
    # mp4's demuxer is named, because others read further files that a video names. FFmpeg gets
    # an open file, because it could take a path for the address of a protocol.
    with is_readable, path.open("rb") as file, av.open(file, format="mp4") as container:
        stream = container.streams.best("video")
        if stream is None or stream.time_base is None:
            raise DataError(str(path), "must hold a video", None, DAMAGED)
        _check_stream(path, stream, shape)
        stream.thread_type = "AUTO"
        if start:
            container.seek(max(0, math.floor(start / stream.time_base) - 1), stream=stream)
        for frame in container.decode(stream):
            at = -1.0 if frame.pts is None else float(frame.pts * stream.time_base)
            # Decoding begins at the key frame before the episode, and in a file of many
            # episodes ends with the last frame of this one.
            if number == 0 and at < times[0] - _TOLERANCE_S:
                continue
            if number == len(times) and may_go_on:
                break
            if number < len(times) and abs(at - times[number]) > _TOLERANCE_S:
                raise DataError(
                    where,
                    f"must have frame {number} at {times[number]:.6f} s",
                    f"{at:.6f} s",
                    LEAVE_OUT,
                )
            if number < len(times):
                if (frame.height, frame.width, 3) != shape:
                    raise DataError(
                        where,
                        f"must have the shape {list(shape)} in all frames",
                        [frame.height, frame.width, 3],
                        LEAVE_OUT,
                    )
                frames[number] = frame.to_ndarray(format="rgb24")
            number += 1
    if number != len(times):
        raise DataError(
            where,
            f"must have {len(times)} frames, one for each row",
            number,
            f"download the video again, or {LEAVE_OUT}",
        )
    return frames


def _check_stream(path: Path, stream: Any, wanted: tuple[int, ...]) -> None:
    """Raise unless a video stream has a known codec and the wanted frame shape."""
    codec = (
        stream.codec_context.codec.canonical_name if stream.codec_context else "none that is known"
    )
    if codec not in CODECS:
        raise DataError(
            str(path),
            f"must be in one of the codecs {', '.join(CODECS)}",
            codec,
            f"encode it again, or {LEAVE_OUT}",
        )
    pixels = stream.format
    bits = max((part.bits for part in pixels.components), default=0) if pixels else 0
    shape = (stream.height, stream.width, 3)
    if shape != wanted or not 0 < bits <= 8:
        raise DataError(
            str(path),
            f"must have frames of shape {list(wanted)}, with 8 bits a channel",
            f"{list(shape)} with {bits} bits",
            LEAVE_OUT,
        )
    # FFmpeg allocates a frame of the size that the stream's packets state, rounded up.
    stream.codec_context.options = {"max_pixels": str((stream.height + 256) * (stream.width + 256))}
