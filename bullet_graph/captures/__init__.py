"""The store of capture caches: entries of what an engine's start would otherwise compile, tune and measure."""
