"""Train convolutional networks on small machines: forward at pixel resolution, backward at patch resolution."""

from gradfilter.apply import apply_, freeze_, remove_
from gradfilter.cost import cost
from gradfilter.describe import describe
from gradfilter.fidelity import fidelity
from gradfilter.plan import Backward, Plan
from gradfilter.planner import plan_for

__version__ = "0.1.0"
__all__ = ["Backward", "Plan", "apply_", "cost", "describe", "fidelity", "freeze_", "plan_for", "remove_"]
