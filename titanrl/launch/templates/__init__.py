"""Processes forked from templates that have already imported the packages of their role."""
