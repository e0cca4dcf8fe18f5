"""Decoders of file formats that readers share: files into arrays, within a bound of memory."""
