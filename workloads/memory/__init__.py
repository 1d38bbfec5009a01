"""The `memory` workload: what a GPT keeps in memory for its backward pass."""
