"""Active checks: small experiments on a training workload before it trains. The entry is `training.check_training`."""
