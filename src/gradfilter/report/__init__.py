"""The report of a training run: one HTML page and one picture."""

from gradfilter.report.results import Beside, Cost, Epoch, Layer, MaskSample, Results, ResultsError, Sample
from gradfilter.report.write import ReportError, write_report

__all__ = ["Beside", "Cost", "Epoch", "Layer", "MaskSample", "ReportError", "Results", "ResultsError", "Sample", "write_report"]
