"""moejax: train and fine-tune sparse Mixture-of-Experts language models in JAX."""
