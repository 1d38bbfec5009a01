"""The `moe_gpt` workload: `char_gpt` with a mixture of experts in every block."""
