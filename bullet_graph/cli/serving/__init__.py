"""What every command that serves a workload shares: options, targets, tables, pictures."""
