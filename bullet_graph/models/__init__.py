"""Model definitions, weights, tokenizers, attention and sampling."""
