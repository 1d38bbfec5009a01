"""Layers whose numerics are the subject of a sweep: linear maps with master weights, routers, mixtures of experts."""
