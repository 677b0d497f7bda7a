"""The policy trainer: torchtitan's Qwen3 on this rank's shard of the mesh, and the actor that runs it."""
