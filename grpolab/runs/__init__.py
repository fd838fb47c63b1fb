"""What a run leaves on disk: its folder and metrics, checkpoints, every rollout, the best policy so far. Knows no method."""
