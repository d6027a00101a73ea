"""Between pixels and patches: how maps are tiled, and the matrices of linear maps between tiled maps.

Pure functions of sizes: no autograd, no kernels, and no tensors but those that a function is given. Nothing here may import
another part of the package but `errors`. docs/operators.md explains the words: cell, coarse twin, single tap, in reach.
"""
