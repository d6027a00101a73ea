"""The backend of `torch.compile(model, backend="gradfilter")`: a model under a plan becomes programs.

Here lives what turns a graph captured by Dynamo into what runs. Nothing below this package imports it: hooks leave marks, see
`gradfilter.marks`, and torch loads the backend by its entry point, when it is first named.
"""
