"""The `rounding` workload: what number formats do to logits, routing decisions and gradients."""
