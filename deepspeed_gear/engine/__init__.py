"""Integration with DeepSpeed engines: initialize and attach."""

from deepspeed_gear.engine.attach import attach, disable, enable, initialize

__all__ = ["attach", "disable", "enable", "initialize"]
