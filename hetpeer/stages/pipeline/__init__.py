"""The pure core of a step at one holder: 1F1B, routes, kept outputs, gradient slots."""
