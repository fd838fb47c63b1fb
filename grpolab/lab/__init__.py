"""What a run leaves, and how one looks at it: run folders, gates, figures, live progress, the notebooks in batch."""
