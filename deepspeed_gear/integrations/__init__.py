"""Adapters for the frameworks that people keep: trainers (TRL) and data planes (TransferQueue)."""
