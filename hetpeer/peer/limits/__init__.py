"""What the owner of a machine allows: settings, sensors, and what holds a volunteer back."""
