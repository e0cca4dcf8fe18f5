"""DeepSpeed's private names, and the gradient divisors of DeepSpeed, DDP and FSDP."""
