"""Benchmarks of kvtide; `python -m benchmarks` runs them and writes benchmarks/results/."""
