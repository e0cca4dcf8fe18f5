"""Host-to-device copies of a batch: fields read in place by kernels, or staged in pinned memory."""
