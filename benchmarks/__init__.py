"""Side by side with peers, in one run, medians of interleaved repeats. `python -m benchmarks` prints the ratios."""
