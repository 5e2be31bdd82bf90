"""Limits of the owner: settings, sensors, and reasons to hold a volunteer back."""
