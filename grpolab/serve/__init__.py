"""A policy behind an OpenAI-compatible endpoint, and who trains through it."""
