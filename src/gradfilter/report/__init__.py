"""The report of a training run: one HTML file and one picture."""

from gradfilter.report.results import Cost, Epoch, Layer, Results, ResultsError, Sample

__all__ = ["Cost", "Epoch", "Layer", "Results", "ResultsError", "Sample"]
