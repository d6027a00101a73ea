"""The exceptions and warnings of gradfilter: every error a user can cause derives from `GradFilterError`."""


class GradFilterError(Exception):
    """Base class of all errors that gradfilter raises on purpose."""


class PlanError(GradFilterError, ValueError):
    """Report a plan that is malformed, or that does not fit the model it is applied to."""


class BudgetError(GradFilterError, ValueError):
    """Report a budget that is malformed, or that no plan can keep."""


class InputError(GradFilterError, ValueError):
    """Report a tensor that a layer with a filtered gradient cannot take."""


class DoubleBackwardError(GradFilterError, RuntimeError):
    """Report a request for second derivatives, which a filtered gradient does not have."""


class RuleError(GradFilterError, ValueError):
    """Report a second rule for a torch function that already has one."""


class WeightsError(GradFilterError, ValueError):
    """Report a weight file that is missing, unreadable, or made for another model."""


class ModelNameError(GradFilterError, ValueError):
    """Report a model name that is not known."""


class DataError(GradFilterError, ValueError):
    """Report images, labels or a data set that cannot be trained on as they are."""


class SettingsError(GradFilterError, ValueError):
    """Report a setting with a value that it cannot have."""


class CheckpointError(GradFilterError, RuntimeError):
    """Report a checkpoint that cannot be written, cannot be read, or belongs to another run."""


class MissingExtraError(GradFilterError, ImportError):
    """Report an optional package that a feature needs and that is not installed."""


class CompileError(GradFilterError, RuntimeError):
    """Report a model under a plan that was compiled, exported or traced in a way that would lose the plan."""


class NotCompilableError(GradFilterError, RuntimeError):
    """Tell the backend why a captured graph has no program: it then runs eagerly."""


class TrunkWarning(UserWarning):
    """Warn that a plan asks for a trunk in bfloat16 on a processor without instructions for it: right, but slower."""


class ExitWarning(UserWarning):
    """Warn that a function without a rule ended a region: the gradient is right, only dearer."""
