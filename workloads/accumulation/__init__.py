"""The `accumulation` workload: an update accumulated from micro-batches against one of the joined batch."""
