"""Processes that are forked, confined or private to this user, and the actors in them."""
