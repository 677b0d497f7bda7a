"""Confined, killable processes for code written by a model."""
