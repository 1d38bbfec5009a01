"""What every training workload shares: precision policies, one clean update, initialisation from a generator."""
