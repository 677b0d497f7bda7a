"""Policy trainer: training steps on a torchtitan model that is sharded over a device mesh, and the actor of each rank."""
