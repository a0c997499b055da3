"""Routing policies compared on simulated replicas: counts first, seconds second."""
