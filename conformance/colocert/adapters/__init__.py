"""Public frameworks as implementations under test. Each module imports without its framework."""
