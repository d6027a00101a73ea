"""Python code that loads the weights of a run without gradfilter."""

from gradfilter.report.results import Results


def make_loading_code(results: Results) -> str:
    """Return the code: what the run gave, or else code that fits any model."""
    if results.loading.strip():
        return results.loading
    return (
        "from safetensors.torch import load_file\n\n"
        f"weights = load_file({results.weights_file!r})  # a dictionary of tensors, by the names of the model's state_dict\n"
        f"model.load_state_dict(weights)  # model: {' '.join(results.model.split())} with {len(results.classes)} classes\n"
        "model.eval()\n"
    )
