"""Precomputed captures on disk: what an engine's start would otherwise compile, tune and measure."""
