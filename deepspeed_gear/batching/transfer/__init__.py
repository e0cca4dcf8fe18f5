"""Host-to-device transfer of a batch: direct or staged."""
