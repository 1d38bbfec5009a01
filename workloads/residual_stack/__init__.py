"""The `residual_stack` workload: what depth does to the gradients of a plain or residual stack of tanh layers."""
