"""Hosts that are pods of Kubernetes."""
