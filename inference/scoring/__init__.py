"""Score a model: perplexity, KL divergence, their intervals, the text, a sample."""
