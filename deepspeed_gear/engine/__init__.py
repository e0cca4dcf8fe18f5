"""Integration with DeepSpeed engines: initialize and attach."""
