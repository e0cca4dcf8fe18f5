"""Host-to-device copies of a batch: zero-copy, copy engine or staged."""
