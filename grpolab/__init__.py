"""grpolab: a Jupyter-first laboratory for post-training language models."""
