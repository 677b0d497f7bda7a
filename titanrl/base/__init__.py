"""Errors, files, imports and user-defined objects, which every other room uses."""
