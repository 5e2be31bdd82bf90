"""A volunteer's daemon: one life after another, as the owner of the machine wishes."""
