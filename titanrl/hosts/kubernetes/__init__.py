"""Kubernetes pods as hosts."""
