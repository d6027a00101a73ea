"""Passes: small functions over a graph of operators, run in the order that `gradfilter.compile.programs` lists them.

Here lives what takes out, joins or renames nodes of a graph. A pass knows shapes and operators, and neither plans nor memory.
Its result computes what the graph computed before, to rounding.
"""
