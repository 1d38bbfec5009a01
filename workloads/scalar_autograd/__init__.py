"""The `scalar_autograd` workload: a reverse-mode engine on single numbers, checked against other engines."""
