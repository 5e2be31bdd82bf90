"""Where devices go when all pipelines have equal stages: a grid of pipelines and stages, as in DT-FM."""
