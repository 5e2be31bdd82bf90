"""The model as data: operators, blocks, their bytes, their checks and their cost."""
