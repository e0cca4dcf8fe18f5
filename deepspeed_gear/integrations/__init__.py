"""Adapters for frameworks that people keep: TRL and OpenRLHF, and the data plane TransferQueue."""
