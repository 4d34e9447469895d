"""The linter's rules, one kind a file."""
