"""The policy trainer: torchtitan's model on this rank's shard of the mesh, and the actor that runs it."""
