"""The training plane: what a sweep trains. Of orch it knows `orchestrator.workload` and `orchestrator.trial` only."""
