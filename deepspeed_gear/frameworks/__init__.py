"""What is known of DeepSpeed, DistributedDataParallel and FSDP: private names, and gradient
divisors.
"""
