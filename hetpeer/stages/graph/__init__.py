"""The model as data: blocks, their bytes, their checks, their cost, and the interpreter."""
