"""The policy trainer: torchtitan's Qwen3 on this rank's share of the mesh, and the actor around it."""
