"""From documents to batches: sources, tokenizers, mixture, packing, loader, and the Markov baseline."""
