"""Every kernel of a forward: Triton's, the calls into FlashInfer, and the plain-torch references."""
