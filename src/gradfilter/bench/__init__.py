"""Side-by-side measurements: `python -m gradfilter.bench` runs them and prints what the README claims."""
