"""The sampler: token ids in, rollouts out, on the fastest forward that is proved to be the model's own."""
