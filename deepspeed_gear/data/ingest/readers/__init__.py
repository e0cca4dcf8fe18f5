"""Readers of source formats, one class for each: `READERS` has them by name."""

from __future__ import annotations

from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.readers.d3rlpy import D3rlpyReader
from deepspeed_gear.data.ingest.readers.exported import ExportedReader
from deepspeed_gear.data.ingest.readers.hdf5 import D4rlReader, RobomimicReader
from deepspeed_gear.data.ingest.readers.lerobot import LerobotReader
from deepspeed_gear.data.ingest.readers.minari import MinariReader
from deepspeed_gear.data.ingest.readers.npz import NpzReader, OgbenchReader, PickleReader
from deepspeed_gear.data.ingest.readers.rlds import RldsReader
from deepspeed_gear.data.ingest.readers.rllib import RllibReader
from deepspeed_gear.data.ingest.readers.tables import TableReader
from deepspeed_gear.data.ingest.readers.webdataset import WebdatasetReader
from deepspeed_gear.data.ingest.readers.zarr import ZarrReader

# In the order in which "auto" tries them: a layout that others would recognise too comes first.
_CLASSES: tuple[type[Reader], ...] = (
    ExportedReader,
    D3rlpyReader,
    D4rlReader,
    MinariReader,
    RobomimicReader,
    LerobotReader,
    RldsReader,
    ZarrReader,
    OgbenchReader,
    NpzReader,
    PickleReader,
    RllibReader,
    WebdatasetReader,
    TableReader,
)
READERS = {reader.format: reader for reader in _CLASSES}
