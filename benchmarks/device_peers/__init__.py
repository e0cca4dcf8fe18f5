"""Tables of this project and of its peers in the memory of one device: `gpu_peers.py`."""
