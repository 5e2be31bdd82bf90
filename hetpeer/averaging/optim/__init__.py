"""Update rules, the outer optimizer and the learning rate."""
