"""Write small zarr stores with zarr, and the arrays that it reads from them.

    python tests/support/formats/make_zarr.py FOLDER

It needs an environment with zarr 3, numcodecs and imagecodecs. The folder `mini_zarr` beside this
file was made by it, with zarr 3.1.6, numcodecs 0.16.6 and imagecodecs 2026.3.6. Each store is a zip
file; the names, dtypes and codecs are those of published data sets:

- `pusht.zarr.zip`: Diffusion Policy's `pusht_cchi_v7_replay.zarr`, version 2, Blosc;
- `umi.zarr.zip`: UMI's `dataset.zarr.zip`, one JPEG XL image per chunk;
- `pusht_v3.zarr.zip`: the arrays of the first one, as zarr 3 writes them by default (zstd);
- `sharded.zarr.zip`: version 3 with shards, transposed axes, gzip, big-endian numbers, checksums,
  and chunks that were never written.

`expected.npz` has each array as `STORE/KEY`, read by zarr.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import imagecodecs
import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec

ENDS = np.array([4, 5, 11, 18])


class JpegXl(Codec):  # type: ignore[misc]
    """The codec of UMI's `imagecodecs_numcodecs.py`, which zarr finds by its name."""

    codec_id = "imagecodecs_jpegxl"

    def __init__(self, **options: Any) -> None:
        self.options = options

    def encode(self, buf: Any) -> bytes:
        image = np.squeeze(np.asarray(buf))
        return imagecodecs.jpegxl_encode(image, level=99, numthreads=1)

    def decode(self, buf: Any, out: Any = None) -> Any:
        image = imagecodecs.jpegxl_decode(bytes(buf))
        return image if out is None else np.copyto(out, image.reshape(out.shape)) or out

    def get_config(self) -> dict[str, Any]:
        return {"id": self.codec_id, "level": 99, "numthreads": 1, **self.options}


numcodecs.register_codec(JpegXl)


def pusht(rng: np.random.Generator) -> dict[str, Any]:
    rows = int(ENDS[-1])
    return {
        "action": rng.uniform(0, 512, (rows, 2)).astype(np.float32),
        "img": rng.integers(0, 256, (rows, 6, 6, 3)).astype(np.float32),
        "keypoint": rng.uniform(0, 512, (rows, 9, 2)).astype(np.float32),
        "n_contacts": rng.integers(0, 3, (rows, 1)).astype(np.float32),
        "state": rng.uniform(0, 512, (rows, 5)).astype(np.float32),
    }


def umi(rng: np.random.Generator) -> dict[str, Any]:
    rows = int(ENDS[-1])
    names = {"eef_pos": 3, "eef_rot_axis_angle": 3, "gripper_width": 1}
    poses = {"demo_start_pose": 6, "demo_end_pose": 6}
    image = np.add.outer(np.arange(8), np.arange(8)) * 8
    frames = [np.stack([image, image[::-1], image + at], axis=-1) for at in range(rows)]
    return {
        "camera0_rgb": np.stack(frames).astype(np.uint8),
        **{f"robot0_{name}": rng.random((rows, n), np.float32) for name, n in names.items()},
        **{f"robot0_{name}": rng.random((rows, n)) for name, n in poses.items()},
    }


def sharded(rng: np.random.Generator) -> dict[str, Any]:
    rows = int(ENDS[-1])
    wide = rng.integers(-(2**40), 2**40, (rows, 3, 5))
    wide[6:12] = 7  # shards, and chunks in a shard, that are never written
    wide[14:16] = 7
    return {
        "action": rng.standard_normal((rows, 3)),
        "obs/wide": wide,
        "obs/half": rng.random((rows, 2)).astype(np.float16),
        "obs/is_open": rng.integers(0, 2, (rows,)).astype(bool),
        "reward": rng.random(rows).astype(np.float32),
    }


def write(folder: Path, name: str, arrays: dict[str, Any]) -> None:
    version = 2 if name in ("pusht", "umi") else 3
    root = zarr.open_group(folder, mode="w", zarr_format=version)
    blosc = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.NOSHUFFLE)
    disk = numcodecs.Blosc(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    for key, values in arrays.items():
        options: dict[str, Any] = {"chunks": (7, *values.shape[1:])}
        if version == 2:
            options["compressors"] = disk if key == "img" else blosc
        if key == "camera0_rgb":
            options = {"chunks": (1, *values.shape[1:]), "compressors": JpegXl()}
        if name == "sharded":
            options = _sharded(key, values)
        options.setdefault("fill_value", 0)
        array = root.create_array(f"data/{key}", shape=values.shape, dtype=values.dtype, **options)
        array[...] = values
    ends = root.create_array("meta/episode_ends", shape=ENDS.shape, dtype="i8", compressors=None)
    ends[...] = ENDS
    if name == "sharded":
        tasks = root.create_array("meta/task", shape=ENDS.shape, dtype="u2")
        tasks[...] = ENDS % 3


def _sharded(key: str, values: Any) -> dict[str, Any]:
    codecs = zarr.codecs
    if key == "obs/wide":
        return {
            "chunks": (2, 2, 5),
            "shards": (6, 4, 5),
            "filters": [codecs.TransposeCodec(order=(2, 0, 1))],
            "serializer": codecs.BytesCodec(endian="big"),
            "compressors": [codecs.GzipCodec()],
            "fill_value": 7,
        }
    if key == "action":
        compressors = [codecs.ZstdCodec(checksum=True), codecs.Crc32cCodec()]
        return {"chunks": (5, 2), "compressors": compressors}
    return {"chunks": (4, *values.shape[1:]), "compressors": [codecs.Crc32cCodec()]}


def main(folder: str) -> None:
    expected = {}
    rng = np.random.default_rng(0)
    makers = {"pusht": pusht, "umi": umi, "pusht_v3": pusht, "sharded": sharded}
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as work:
            store = Path(work, "store")
            write(store, name, make(rng))
            shutil.make_archive(str(Path(folder, f"{name}.zarr")), "zip", store)
            for key, array in zarr.open_group(store, mode="r").members(max_depth=None):
                if isinstance(array, zarr.Array):
                    expected[f"{name}/{key}"] = array[...]
    np.savez_compressed(Path(folder, "expected.npz"), **expected)


if __name__ == "__main__":
    main(sys.argv[1])
