"""Several processes: their launch, FSDP2's shards, and DeepSpeed's ZeRO."""
