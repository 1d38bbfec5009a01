"""The `moe_router` workload: a mixture-of-experts regression whose router can be stressed."""
