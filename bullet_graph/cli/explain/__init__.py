"""``bullet-graph explain``: what a decision trace holds."""
