"""Clients of trainer and generators for your own loop."""
