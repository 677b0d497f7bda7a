"""Hosts, process meshes and actors of a run: started together, watched, and stopped in order."""
