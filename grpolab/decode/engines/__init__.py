"""The forward passes of the sampler: one for Llama-shaped models, one through any Hugging Face model."""
